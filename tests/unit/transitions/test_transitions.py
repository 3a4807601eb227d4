"""Transitions of windows and slices, worked by hand: a three-step episode that ends in each of the three ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tree
from played import LAYOUTS, Played, laid_out

import reverb_writer as rw
from reverb_writer.slices import SliceSampler, Trajectories, find_trajectories, gather, read_markers
from reverb_writer.steps import FIRST, LAST, MID

ENDS = ("terminated", "truncated", "cut")

# Observations 10 to 13, actions 0 to 2, rewards 1, 2 and 4. A cut window has the row after its last action, too: the
# episode goes on there. Expected: three pairs, the last one with discount 0 if the episode terminated.
REWARDS = [1, 2, 4, 0]


def steps_of(layout: str, end: str) -> Any:
    """Return a window of the episode's rows in a layout, leaves [1, 4, ...]."""
    rows = [
        {**Played(10, 3, end, 1.0).row(t), "reward": np.float32(reward or 8 * (end == "cut"))}
        for t, reward in enumerate(REWARDS)
    ]
    steps = [laid_out(row, layout, following) for row, following in zip(rows, [*rows[1:], None], strict=True)]
    return tree.map_structure(lambda *leaves: np.stack(leaves)[None], *steps)


def recorded(end: str) -> dict[str, Any]:
    """Return the rows that `record` and `Episode.steps` make."""
    steps: dict[str, Any] = steps_of("recorded", end)
    return steps


def without(steps: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {**{name: column for name, column in steps.items() if name not in names}, **more}


def joined(*parts: Any) -> Any:
    """Return windows end to end."""
    return tree.map_structure(lambda *columns: np.concatenate(columns, axis=1), *parts)


def padded(steps: Any, num_rows: int) -> Any:
    return tree.map_structure(lambda column: np.pad(column, ((0, 0), (0, num_rows))), steps)


def test_the_first_pairs_of_windows_are_their_first_rows() -> None:
    found = rw.to_transitions({**recorded("terminated"), "env": np.array([5])})
    first = found.first()
    assert first.extras["env"].tolist() == [5]  # a leaf without rows
    assert [leaf.tolist() for leaf in tree.flatten(first.observation)] == [[10]]
    assert (first.action.tolist(), first.next_observation.tolist()) == ([0], [11])
    assert (first.mask.tolist(), first.continues.tolist()) == ([True], [False])
    with pytest.raises(rw.errors.StructureError, match="`first` is for transitions"):
        first.first()


def two(layout: str) -> Any:
    """Return a window of two episodes."""
    return joined(steps_of(layout, "terminated"), steps_of(layout, "truncated"))


IS_FIRST = {"is_first": recorded("cut")["is_first"]}
OF_ONE, OF_TWO = [1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1, 1]
AFTER_RESET = np.array([[FIRST, MID, MID, MID, LAST, LAST]])  # padding follows a step that says that MID does
CUT, DISCOUNTS = padded(steps_of("trajectory", "cut"), 2), steps_of("discount", "terminated")


@pytest.mark.parametrize(
    ("steps", "mask", "expected"),
    [
        pytest.param(recorded("cut"), [0, 1, 1, 0], [0, 1, 0], id="a mask leaves rows out"),
        pytest.param(two("flags"), [1] * 8, OF_TWO, id="a mask tells that flags are of two episodes"),
        pytest.param(two("discount"), [1] * 4 + [0] * 4, [1, 1, 1, 0, 0, 0, 0], id="a mask leaves an episode out"),
        pytest.param(padded(DISCOUNTS, 2), None, OF_ONE, id="padding after a discount of 0"),
        pytest.param(padded({**DISCOUNTS, **IS_FIRST}, 2), None, OF_ONE, id="padding after a discount of 0, starts"),
        pytest.param({**two("discount"), **joined(IS_FIRST, IS_FIRST)}, None, OF_TWO, id="starts beside discounts"),
        pytest.param(without(two("trajectory")._asdict(), "next_step_type"), None, OF_TWO, id="no next step type"),
        pytest.param(CUT._replace(step_type=AFTER_RESET), None, OF_ONE, id="padding of TF-Agents after a cut"),
    ],
)
def test_pairs_are_of_rows_of_one_episode(steps: Any, mask: list[int] | None, expected: list[int]) -> None:
    found = rw.to_transitions(steps, mask=None if mask is None else np.array([mask], bool))
    assert found.mask.tolist() == [[bool(flag) for flag in expected]]


def test_episodes_of_gymnasiums_flags_are_told_apart_in_a_flat_batch() -> None:
    flat = rw.to_transitions(tree.map_structure(lambda column: column[0], two("flags")))
    assert (flat.mask.tolist(), flat.observation[flat.mask].tolist()) == ([*map(bool, OF_TWO)], [10, 11, 12] * 2)


def test_stored_discounts_count_and_the_other_fields_go_with_the_action() -> None:
    steps = {**recorded("truncated"), "seed": np.full((1, 4), 7), "extras": {"log_prob": np.arange(4.0)[None]}}
    steps["discount"] = np.array([[0.5, 0.25, 0.125, 0.0]])
    found = rw.to_transitions(steps)
    assert found.discount.tolist() == [[0.5, 0.25, 0.125]]
    assert {*found.extras} == {"seed", "extras"}
    assert found.extras["extras"]["log_prob"].tolist() == [[0, 1, 2]]
    info = {"log_prob": np.arange(4.0)[None]}
    found = rw.to_transitions(steps_of("trajectory", "cut")._replace(policy_info=info))
    assert found.extras["policy_info"]["log_prob"].shape == (1, 3)


def test_what_is_masked_counts_for_nothing() -> None:
    transitions = rw.to_transitions(joined(recorded("terminated"), recorded("truncated")))
    ratios = np.where(transitions.mask, 1.0, np.nan)
    traced = rw.returns.vtrace(transitions, np.ones((1, 8)), ratios, gamma=0.5)
    assert (traced.values[0, 3], traced.advantages[0, 3]) == (0, 0)
    errors = np.where(transitions.mask, [[1.0, -2.0, 3.0, 0, 1.0, 1.0, 1.0]], 99.0)
    assert rw.returns.sequence_priorities(errors, transitions, max_weight=1.0).tolist() == [3.0]
    normalized = rw.returns.normalize(errors, transitions)
    assert normalized[0, 3] == 0
    assert normalized.sum() == pytest.approx(0)


STEPS = recorded("terminated")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([STEPS], "got a list. A table without a stored spec"),
        ((1, 2, 3), "got a tuple"),
        (without(STEPS, "action"), "the steps lack `action`; found 'observation', 'reward'"),
        ({**STEPS, "next_observation": 1}, "already are transitions. Use `batch.data` as it is"),
        (
            without(STEPS, "discount", "is_first", "is_last", "terminated", "truncated"),
            "no flags, only 'observation', 'action', 'reward'. They need `discount`, or `is_last`",
        ),
        (
            without(STEPS, "discount", "terminated", "truncated"),
            "lack `discount`, `terminated` or `is_terminal`, which",
        ),
        (
            without(STEPS, "discount", "is_last", "truncated"),
            r"lack `is_last`, `step_type` or `truncated`, which .*\. Flags: `is_first`, `terminated`\. ",
        ),
        (without(STEPS, "terminated", terminated=STEPS["is_first"]), "set on 1 rows that are no boundary steps"),
        (
            # CleanRL's way: flags beside the action. The reward of 4 gives it away; without it the discount does.
            without(steps_of("flags", "terminated"), terminated=np.array([[0, 0, 1, 0]])),
            "set on 1 rows of actions: these rows have a reward",
        ),
        (
            without(STEPS, "is_first", "is_last", reward=np.zeros((1, 4)), terminated=np.array([[0, 0, 1, 0]]) > 0),
            "set on 1 rows of actions",
        ),
        # Rows that may be of another episode.
        (two("discount"), "`discount` is the only flag, and 3 rows .* follow a discount of 0"),
        (padded(steps_of("flags", "truncated"), 3), "rows after a boundary step, .* lack `is_first` or `step_type`"),
        ({**STEPS, "is_last": STEPS["is_last"][0]}, "flags must all be"),
        ({**STEPS, "reward": np.zeros((1, 3))}, r"`reward`: expected leaves that begin .* flags' shape, \(1, 4\)"),
        (tree.map_structure(lambda column: column[:, :1], STEPS), "windows of 1 steps hold no transition"),
    ],
)
def test_what_steps_do_not_say_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(rw.errors.StructureError, match=message):
        rw.to_transitions(batch)


def test_reward_of_a_boundary_step_is_warned_of_unless_it_is_padding() -> None:
    steps = {"observation": np.arange(3), "action": np.zeros(3), "reward": np.array([0, 0, 7]), "discount": np.ones(3)}
    marked = [{"is_last": np.array([False, False, True])}, {"step_type": np.array([FIRST, MID, LAST])}]
    for marks in marked:
        with pytest.warns(UserWarning, match="boundary steps .* have a reward, which is in no transition"):
            found = rw.to_transitions({**steps, **marks})
        assert found.reward[found.mask].tolist() == [0, 0]
        rw.to_transitions({**steps, **marks}, mask=np.array([True, True, False]))
        rw.to_transitions({**steps, **marks, "reward": np.array([0, 7, 0])})


def test_some_flags_may_have_a_last_axis_of_size_one() -> None:
    found = rw.to_transitions({**STEPS, "is_last": STEPS["is_last"][..., None]})
    assert found.mask.tolist() == [[True] * 3]


def test_masks_and_markers_of_other_shapes_are_refused() -> None:
    with pytest.raises(rw.errors.StructureError, match=r"a mask has shape \(4,\), expected \(1, 4\) as the flags"):
        rw.to_transitions(STEPS, mask=np.ones(4, bool))
    slices = SliceSampler(1, 3).each(Trajectories.from_lengths([3]), np.random.default_rng(0))
    markers = gather({"reward": np.zeros(3)}, slices).markers
    with pytest.raises(rw.errors.StructureError, match=r"markers must be \[N\]"):
        rw.to_transitions(rw.Batch(STEPS, None, markers))


def test_transitions_over_n_steps_are_not_taken_twice() -> None:
    folded = rw.n_step(rw.to_transitions(STEPS), 2, 0.5)
    with pytest.raises(rw.errors.StructureError, match="already are over several steps"):
        rw.n_step(folded, 2, 0.5)
    with pytest.raises(rw.errors.StructureError, match="transitions over n steps overlap"):
        rw.returns.gae(folded, np.ones((1, 4)), gamma=0.5, lambda_=0.5)
    with pytest.raises(rw.errors.SpecError, match="the transitions already have `discounts` and `continues`"):
        rw.returns.gae(rw.to_transitions(STEPS), np.ones((1, 4)), gamma=0.5, lambda_=0.5, discounts=np.ones((1, 3)))
    nested = rw.to_transitions({**STEPS, "reward": {"a": STEPS["reward"], "b": STEPS["reward"]}})
    assert nested.reward["b"].tolist() == [[1, 2, 4]]
    with pytest.raises(rw.errors.StructureError, match="is a nest"):
        rw.n_step(nested, 2, 0.5)
    assert rw.n_step(nested._replace(reward=nested.reward["a"]), 1, 0.5).reward.tolist() == [[1, 2, 4]]


def frameworks(name: str) -> Any:
    """Return what makes an array of a library, and what makes one of NumPy of it."""
    pytest.importorskip("array_api_compat")
    library = pytest.importorskip({"jax": "jax.numpy"}.get(name, name))
    return library.asarray


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_and_jax_arrays_are_taken(name: str, layout: str) -> None:
    make = frameworks(name)
    for end in ENDS:
        steps = tree.map_structure(make, steps_of(layout, end))
        found = rw.to_transitions(SimpleNamespace(data=steps, info=SimpleNamespace(mask=np.ones((1, 4), bool))))
        folded = rw.n_step(found, 2, gamma=0.5)
        observation = steps[1] if layout == "trajectory" else steps["observation"]
        assert type(found.mask) is type(folded.next_observation) is type(observation)
        expected = rw.to_transitions(steps_of(layout, end), mask=np.ones((1, 4), bool))
        for one, other in zip(tree.flatten(found), tree.flatten(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(one), other)
        for one, other in zip(tree.flatten(folded), tree.flatten(rw.n_step(expected, 2, gamma=0.5)), strict=True):
            np.testing.assert_array_equal(np.asarray(one), other)
        values = make(np.array([[8.0, 4.0, 2.0, 6.0]], np.float32))
        advantages = rw.returns.gae(found, values, gamma=0.5, lambda_=0.5).advantages
        last = 2.0 if end == "terminated" else 5.0
        np.testing.assert_allclose(np.asarray(advantages)[0, 2], last)


def test_slices_of_tensors_are_taken() -> None:
    torch = frameworks("torch")
    steps = tree.map_structure(lambda column: column[0], recorded("terminated"))
    batch = gather(steps, SliceSampler(1, 3).each(find_trajectories(read_markers(steps)), np.random.default_rng(0)))
    info = SimpleNamespace(mask=None, lengths=np.array([4]))
    converted = rw.Batch(batch.data, info, batch.markers).map_arrays(torch)
    found = rw.to_transitions(converted)
    np.testing.assert_array_equal(np.asarray(found.mask), rw.to_transitions(batch).mask)


def test_jax_compiles_it() -> None:
    make = frameworks("jax")
    import jax

    def advantages(steps: Any, values: Any) -> Any:
        transitions = rw.to_transitions(steps)
        folded = rw.n_step(transitions, 2, 0.5)
        return rw.returns.gae(transitions, values, gamma=0.5, lambda_=0.5).advantages, folded.reward

    compiled = jax.jit(advantages)
    found, folded = compiled(tree.map_structure(make, STEPS), make(np.array([[8.0, 4.0, 2.0, 6.0]], np.float32)))
    np.testing.assert_allclose(np.asarray(found), [[-5.125, -0.5, 2.0]])
    np.testing.assert_allclose(np.asarray(folded), [[2.0, 4.0, 4.0]])


def test_gradients_pass_through() -> None:
    torch = pytest.importorskip("torch")
    steps = tree.map_structure(torch.asarray, recorded("truncated"))
    steps["observation"] = steps["observation"].float().requires_grad_()
    rw.n_step(rw.to_transitions(steps), 2, 0.5).next_observation.sum().backward()
    assert steps["observation"].grad.tolist() == [[0, 0, 1, 2]]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_targets_of_a_batch_are_those_of_its_transitions(layout: str, end: str) -> None:
    """Of a batch with columns of rewards, ends and values, and no others."""
    steps, values = steps_of(layout, end), np.array([[8.0, 4.0, 2.0, 6.0]])
    fields = steps._asdict() if layout == "trajectory" else steps
    fields = without(fields, "observation", "action", value=values, extras={"value": values[..., None]})
    expected = rw.returns.gae(rw.to_transitions(steps), values, gamma=0.5, lambda_=0.5)
    batch: Any = rw.Batch(fields, SimpleNamespace(mask=None, lengths=np.array([4])))
    for found in (
        rw.returns.gae(batch, "value", gamma=0.5, lambda_=0.5),
        rw.returns.gae(batch, "extras/value", gamma=0.5, lambda_=0.5),
        rw.returns.gae(fields, "value", gamma=0.5, lambda_=0.5),
        rw.returns.gae(batch, values, gamma=0.5, lambda_=0.5),
    ):
        assert found.advantages.tolist() == expected.advantages.tolist()
        assert found.returns.tolist() == expected.returns.tolist()
    advantages = {"terminated": [-5.125, -0.5, 2.0]}.get(end, [-4.9375, 0.25, 5.0])
    assert expected.advantages.tolist() == [advantages]


def test_values_of_a_batch_that_are_not_known_are_refused() -> None:
    """Extras of a recorder are 0 on the boundary step, whose value counts only if the episode was truncated."""
    values = np.array([[8.0, 4.0, 2.0, 0.0]])
    with pytest.raises(rw.errors.StructureError, match="`value` is 0 on final observations of truncated episodes"):
        rw.returns.gae({**recorded("truncated"), "value": values}, "value", gamma=0.5, lambda_=0.5)
    found = rw.returns.gae({**recorded("terminated"), "value": values}, "value", gamma=0.5, lambda_=0.5)
    assert found.advantages.tolist() == [[-5.125, -0.5, 2.0]]
    with pytest.raises(rw.errors.StructureError, match=r"no leaf `critic`: there are `action`, `discount`"):
        rw.returns.gae(recorded("truncated"), "critic", gamma=0.5, lambda_=0.5)
    with pytest.raises(rw.errors.SpecError, match="so the first argument must be a batch"):
        rw.returns.gae(np.ones((1, 3)), "value", gamma=0.5, lambda_=0.5)


def test_slices_with_the_row_after_them_have_a_target_for_each_row() -> None:
    steps = tree.map_structure(lambda column: column[0], joined(*map(recorded, ENDS[:2])))
    steps["value"] = np.array([8.0, 4.0, 2.0, 6.0, 8.0, 4.0, 2.0, 6.0])
    sampler, rng = SliceSampler(4, 3, by="row"), np.random.default_rng(0)
    slices = next(sampler.one_pass(find_trajectories(read_markers(steps)), rng, shuffle=False))
    gathered = gather(steps, slices)  # rows 0 to 2 and 1 to 3, and 4 to 6 and 5 to 7
    after = tree.map_structure(lambda leaf: leaf[slices.next_rows], steps)
    batch = rw.Batch(gathered.data, None, gathered.markers, after)
    found = rw.to_transitions(batch)
    assert found.observation.tolist() == gathered.data["observation"].tolist()
    assert found.mask.tolist() == [True] * 3 + [True, True, False] + [True] * 3 + [True, True, False]
    assert found.next_observation[found.mask].tolist() == [11, 12, 13, 12, 13] * 2
    assert found.discount[found.mask].tolist() == [1, 1, 0, 1, 0, 1, 1, 1, 1, 1]
    assert found.continues.tolist() == [True, True, False, True, False, False] * 2
    advantages = rw.returns.gae(batch, "value", gamma=0.5, lambda_=0.5).advantages
    # By hand, as in docs/explanation/steps.md: terminated, then truncated.
    assert advantages.tolist() == [-5.125, -0.5, 2, -0.5, 2, 0, -4.9375, 0.25, 5, 0.25, 5, 0]
