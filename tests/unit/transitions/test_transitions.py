"""Transitions of windows and slices, worked by hand: a three-step episode that ends in each of the three ways."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tree
from played import LAYOUTS, Played, laid_out

import reverb_writer as rw
from reverb_writer import rows
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL
from reverb_writer.rows.layouts import STEP_FIRST, STEP_LAST
from reverb_writer.slices import SliceSampler, find_trajectories, gather

ENDS = ("terminated", "truncated", "cut")

# Observations 10 to 13, actions 0 to 2, rewards 1, 2 and 4. A cut window has the row after its last action, too: the
# episode goes on there. Expected: three pairs, the last one with discount 0 if the episode terminated.
REWARDS = [1, 2, 4, 0]


def steps_of(layout: str, end: str) -> Any:
    """Return a window of the episode's rows in a layout, leaves [1, 4, ...]."""
    listed = [
        {**Played(10, 3, end, 1.0).row(t), "reward": np.float32(reward or 8 * (end == "cut"))}
        for t, reward in enumerate(REWARDS)
    ]
    steps = [laid_out(row, layout, following) for row, following in zip(listed, [*listed[1:], None], strict=True)]
    return tree.map_structure(lambda *leaves: np.stack(leaves)[None], *steps)


def recorded(end: str) -> dict[str, Any]:
    """Return the rows that `record` and `Episode.steps` make."""
    steps: dict[str, Any] = steps_of("recorded", end)
    return steps


def without(steps: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {**{name: column for name, column in steps.items() if name not in names}, **more}


def settled(steps: Any) -> Any:
    """Return the `last_row` that steps of this layout need."""
    is_open = isinstance(steps, dict) and "terminated" in steps and "is_last" not in steps
    return "boundary" if is_open else None


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
AFTER_RESET = np.array([[STEP_FIRST, 1, 1, 1, STEP_LAST, STEP_LAST]])  # padding follows a step that says that 1 does
CUT, DISCOUNTS = padded(steps_of("trajectory", "cut"), 2), steps_of("discount", "terminated")


@pytest.mark.parametrize(
    ("steps", "mask", "expected"),
    [
        pytest.param(recorded("cut"), [0, 1, 1, 0], [0, 1, 0], id="a mask leaves rows out"),
        pytest.param(two("flags"), [1] * 8, OF_TWO, id="a mask shows that flags are of two episodes"),
        pytest.param(two("discount"), [1] * 4 + [0] * 4, [1, 1, 1, 0, 0, 0, 0], id="a mask leaves an episode out"),
        pytest.param(padded(DISCOUNTS, 2), None, OF_ONE, id="padding after a discount of 0"),
        pytest.param(padded({**DISCOUNTS, **IS_FIRST}, 2), None, OF_ONE, id="padding after a discount of 0, starts"),
        pytest.param({**two("discount"), **joined(IS_FIRST, IS_FIRST)}, None, OF_TWO, id="starts beside discounts"),
        pytest.param(without(two("trajectory")._asdict(), "next_step_type"), None, OF_TWO, id="no next step type"),
        pytest.param(CUT._replace(step_type=AFTER_RESET), None, OF_ONE, id="padding of TF-Agents after a cut"),
    ],
)
def test_pairs_are_of_rows_of_one_episode(steps: Any, mask: list[int] | None, expected: list[int]) -> None:
    found = rw.to_transitions(steps, mask=None if mask is None else np.array([mask], bool), last_row=settled(steps))
    assert found.mask.tolist() == [[bool(flag) for flag in expected]]


def test_episodes_of_gymnasiums_flags_are_told_apart_in_a_flat_batch() -> None:
    flat = rw.to_transitions(tree.map_structure(lambda column: column[0], two("flags")), last_row="boundary")
    assert (flat.mask.tolist(), flat.observation[flat.mask].tolist()) == ([*map(bool, OF_TWO)], [10, 11, 12] * 2)


def test_kinds_count_more_than_leaves() -> None:
    """By hand: an episode of two actions that terminated, an episode of one action, cut, and padding."""
    kinds = np.array([[FIRST | ACTION, ACTION, LAST | TERMINAL, FIRST | ACTION, 0, PADDING]], np.uint8)
    columns = {name: np.arange(6.0)[None] for name in ("observation", "action", "reward")}
    of_leaves = {**columns, "is_last": np.ones((1, 6), bool)}  # flags that would say otherwise
    batch = rw.Batch(of_leaves, None, row_kinds=kinds)
    for found in (rw.to_transitions(columns, kinds=kinds), rw.to_transitions(batch)):
        assert found.mask.tolist() == [[True, True, False, True, False]]
        assert found.discount.tolist() == [[1, 0, 0, 1, 0]]
        assert found.continues.tolist() == [[True, False, False, False, False]]
        assert found.next_observation.tolist() == [[1, 2, 3, 4, 5]]
        assert found.extras == {}
    masked = rw.to_transitions(batch, mask=np.array([[1, 0, 1, 1, 1, 1]], bool))
    assert masked.mask.tolist() == [[False, False, False, True, False]]
    assert rw.to_transitions(batch, kinds=np.full((1, 6), ACTION, np.uint8)).mask.all()


def test_a_last_row_with_an_action_is_a_transition_if_the_argument_says_so() -> None:
    """Rewards 1, 2 and 4 of a terminated episode, then 8 and 16 of a truncated one, whose final state was not kept."""
    last = LAST | ACTION
    kinds = np.array([[FIRST | ACTION, ACTION, last | TERMINAL, FIRST | ACTION, last]], np.uint8)
    columns = {"observation": np.arange(5)[None], "action": np.arange(5)[None], "reward": 2.0 ** np.arange(5)[None]}
    found = rw.to_transitions(columns, kinds=kinds)
    assert (found.mask.tolist(), found.discount.tolist()) == ([[True, True, False, True]], [[1, 1, 0, 1]])
    for whole in (
        rw.to_transitions(columns, kinds=kinds, last_row="action"),
        rw.to_transitions(rw.Batch(columns, None, row_kinds=kinds, last_row="action")),
        rw.to_transitions(rw.Batch(columns, None, row_kinds=kinds), last_row="action"),
    ):
        assert whole.mask.tolist() == [[True, True, True, True, False]]
        assert whole.discount.tolist() == [[1, 1, 0, 1, 0]]
        assert whole.next_observation.tolist() == [[1, 2, 2, 4, 4]]
        assert whole.continues.tolist() == [[True, True, False, False, False]]
        assert whole.reward.tolist() == [[1, 2, 4, 8, 16]]
    flags = {"terminated": np.array([[0, 0, 1, 0, 0]]) > 0, "truncated": np.array([[0, 0, 0, 0, 1]]) > 0}
    by_leaves = rw.to_transitions({**columns, **flags}, last_row="action")
    assert (by_leaves.mask.tolist(), by_leaves.discount.tolist()) == (whole.mask.tolist(), whole.discount.tolist())
    flat = rw.to_transitions({name: leaf[0] for name, leaf in columns.items()}, kinds=kinds[0], last_row="action")
    assert flat.next_observation.tolist() == [1, 2, 2, 4, 4]
    returns = rw.returns.discounted_returns(whole, np.zeros((1, 6)), gamma=0.5)
    assert returns.tolist() == [[1 + 2 / 2 + 4 / 4, 2 + 4 / 2, 4, 8, 0]]


def test_stored_discounts_count_and_the_other_fields_go_with_the_action() -> None:
    steps = {**recorded("truncated"), "seed": np.full((1, 4), 7), "extras": {"log_prob": np.arange(4.0)[None]}}
    steps["discount"] = np.array([[0.5, 0.25, 0.125, 0.0]])
    found = rw.to_transitions({**steps, "traj_ids": np.full((1, 4), 3)})
    assert found.discount.tolist() == [[0.5, 0.25, 0.125]]
    assert {*found.extras} == {"seed", "log_prob", "traj_ids"}
    assert found.extras["log_prob"].tolist() == [[0, 1, 2]]
    info = {"log_prob": np.arange(4.0)[None]}
    found = rw.to_transitions(steps_of("trajectory", "cut")._replace(policy_info=info))
    assert found.extras["policy_info"]["log_prob"].shape == (1, 3)
    found = rw.to_transitions({**steps, "extras": np.arange(4.0)[None]})
    assert found.extras["extras"].tolist() == [[0, 1, 2]]


def test_two_extras_of_one_name_are_refused() -> None:
    steps = {**recorded("truncated"), "seed": np.zeros((1, 4)), "extras": {"seed": np.ones((1, 4))}}
    with pytest.raises(rw.errors.StructureError, match="`seed`: a field of the steps and a field of their `extras`"):
        rw.to_transitions(steps)


def test_observations_may_be_changed_in_place() -> None:
    steps = {**recorded("terminated"), "observation": np.array([[10.0, 20, 30, 40]])}
    found = rw.to_transitions(steps)
    found.observation[...] /= 10
    assert found.next_observation.tolist() == [[20, 30, 40]]
    found.next_observation[...] /= 10
    assert found.observation.tolist() == [[1, 2, 3]]


def test_the_text_of_transitions_shows_shapes() -> None:
    text = repr(rw.to_transitions({**recorded("terminated"), "extras": {"value": np.zeros((1, 4))}}))
    assert text.startswith("Transitions(observation=int64 [1, 3], action=int64 [1, 3], reward=float32 [1, 3], ")
    assert text.endswith("continues=bool [1, 3], extras={'value': float64 [1, 3]})")


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
        ({**STEPS, "reward": np.zeros((1, 3))}, r"`reward`: expected leaves that begin .* the kinds, \(1, 4\)"),
        (tree.map_structure(lambda column: column[:, :1], STEPS), "windows of 1 steps hold no transition"),
        # `reverb_writer.rows` refuses what leaves do not show; its own tests have the cases.
        (without(STEPS, "discount", "is_first", "is_last", "terminated", "truncated"), "no leaf shows where episodes"),
        (without(STEPS, "is_first", "is_last"), "Pass `last_row='action'` if they stand beside the last action"),
    ],
)
def test_steps_without_a_needed_field_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(rw.errors.StructureError, match=message):
        rw.to_transitions(batch)


def test_some_flags_may_have_a_last_axis_of_size_one() -> None:
    found = rw.to_transitions({**STEPS, "is_last": STEPS["is_last"][..., None]})
    assert found.mask.tolist() == [[True] * 3]


def test_masks_and_kinds_of_other_shapes_are_refused() -> None:
    kinds = np.full((1, 4), ACTION, np.uint8)
    for known in (kinds, None):
        with pytest.raises(rw.errors.StructureError, match=r"the mask has shape \(4,\), expected \(1, 4\) as the"):
            rw.to_transitions(STEPS, mask=np.ones(4, bool), kinds=known)
    with pytest.raises(rw.errors.StructureError, match=r"begin with the shape of the kinds, \(1, 5\)"):
        rw.to_transitions(STEPS, kinds=np.full((1, 5), ACTION, np.uint8))
    with pytest.raises(rw.errors.StructureError, match=r"the kinds must be \[B, T\] .* got shape \(1, 4, 1\)"):
        rw.to_transitions(STEPS, kinds=kinds[..., None])


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
        steps, last_row = tree.map_structure(make, steps_of(layout, end)), settled(steps_of(layout, end))
        found = rw.to_transitions(rw.Batch(steps, None, last_row=last_row))
        folded = rw.n_step(found, 2, gamma=0.5)
        observation = steps[1] if layout == "trajectory" else steps["observation"]
        assert type(found.mask) is type(folded.next_observation) is type(observation)
        expected = rw.to_transitions(steps_of(layout, end), last_row=last_row)
        for one, other in zip(tree.flatten(found), tree.flatten(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(one), other)
        for one, other in zip(tree.flatten(folded), tree.flatten(rw.n_step(expected, 2, gamma=0.5)), strict=True):
            np.testing.assert_array_equal(np.asarray(one), other)
        values = make(np.array([[8.0, 4.0, 2.0, 6.0]], np.float32))
        advantages = rw.returns.gae(found, values, gamma=0.5, lambda_=0.5).advantages
        last = 2.0 if end == "terminated" else 5.0
        np.testing.assert_allclose(np.asarray(advantages)[0, 2], last)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_kinds_and_argument_work_on_tensors_and_jax_arrays(name: str) -> None:
    make = frameworks(name)
    kinds = np.array([[FIRST | ACTION, LAST | ACTION | TERMINAL, FIRST | ACTION]], np.uint8)
    columns = {"observation": np.arange(3)[None], "action": np.arange(3)[None], "reward": np.ones((1, 3), np.float32)}
    steps = {**tree.map_structure(make, columns), "text": np.array([["a", "b", "c"]], object)}
    for given in (kinds, make(kinds)):
        found = rw.to_transitions(steps, kinds=given, last_row="action")
        assert np.asarray(found.mask).tolist() == [[True, True, False]]
        assert np.asarray(found.discount).tolist() == [[1, 0, 0]]
        assert np.asarray(found.next_observation).tolist() == [[1, 1, 2]]
    observed = {**steps, "observation": {"number": steps["observation"], "text": steps["text"]}}
    found = rw.to_transitions(observed, kinds=make(kinds), last_row="action")
    assert found.next_observation["text"].tolist() == [["b", "b", "c"]]
    assert rw.n_step(found, 2, 0.5).next_observation["text"].tolist() == [["b", "b", "c"]]


def slices_of(steps: Any, slice_len: int, kinds: Any = None) -> rw.Batch:
    """Return all slices of this length, with the row after each; steps without kinds show them."""
    found = rows.kinds_of(steps)
    sampler, rng = SliceSampler(4, slice_len, by="row"), np.random.default_rng(0)
    slices = next(sampler.one_pass(find_trajectories(found), rng, shuffle=False))
    after = tree.map_structure(lambda leaf: leaf[slices.next_rows], steps)
    next_kinds = None if kinds is None else kinds[slices.next_rows]
    return dataclasses.replace(gather(steps, slices, kinds), next=after, next_kinds=next_kinds)


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("has_kinds", [True, False])
def test_slices_of_tensors_are_taken(name: str, has_kinds: bool) -> None:
    make = frameworks(name)
    steps = tree.map_structure(lambda column: column[0], joined(*map(recorded, ENDS[:2])))
    steps = {
        **steps,
        "observation": {"x": steps["observation"], "text": steps["observation"].astype(str).astype(object)},
    }
    batch = slices_of(steps, 3, rows.kinds_of(steps) if has_kinds else None)
    for one in (batch, dataclasses.replace(batch, next=None, next_kinds=None)):
        converted = one.map_arrays(lambda leaf: leaf if leaf.dtype.kind == "O" else make(leaf))
        found, expected = rw.to_transitions(converted), rw.to_transitions(one)
        for leaf, other in zip(tree.flatten(found), tree.flatten(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(leaf), other)


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
    fields = without(fields, "observation", "action", value=values, extras={"critic": values[..., None]})
    expected = rw.returns.gae(rw.to_transitions(steps, last_row=settled(steps)), values, gamma=0.5, lambda_=0.5)
    batch = rw.Batch(fields, None, last_row=settled(steps))
    for found in (
        rw.returns.gae(batch, "value", gamma=0.5, lambda_=0.5),
        rw.returns.gae(batch, "extras/critic", gamma=0.5, lambda_=0.5),
        rw.returns.gae(batch, values, gamma=0.5, lambda_=0.5),
        *([] if settled(steps) else [rw.returns.gae(fields, "value", gamma=0.5, lambda_=0.5)]),
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


def test_final_values_that_the_recorder_knows_count() -> None:
    """Two episodes in a row of rewards 1, 2, 4: truncated, then terminated, whose final value is 0 by the recorder."""
    steps = without(joined(recorded("truncated"), recorded("terminated")), "discount")
    steps["extras"] = {"value": np.array([[8.0, 4, 2, 6, 8, 4, 2, 0]])}
    found = rw.returns.gae(steps, "extras/value", gamma=0.5, lambda_=0.5)
    # By hand, as in docs/explanation/steps.md.
    assert found.advantages.tolist() == [[-4.9375, 0.25, 5, 0, -5.125, -0.5, 2]]
    cut = {"reward": np.ones((1, 2)), "value": np.array([[3.0, 0.0]])}  # a value of 0 that is no final value
    batch = rw.Batch(cut, None, row_kinds=np.full((1, 2), ACTION, np.uint8))
    assert rw.returns.gae(batch, "value", gamma=0.5, lambda_=0.5).advantages.tolist() == [[-2]]


@pytest.mark.parametrize("layout", [*LAYOUTS, "kinds"])
def test_slices_with_the_row_after_them_have_a_target_for_each_row(layout: str) -> None:
    if layout in ("flags", "discount"):  # one needs the argument, and the other shows no truncated episode
        return
    of_layout = "recorded" if layout == "kinds" else layout
    steps = tree.map_structure(lambda column: column[0], joined(*(steps_of(of_layout, end) for end in ENDS[:2])))
    fields = steps._asdict() if layout == "trajectory" else steps
    fields = {**without(fields, "policy_info"), "value": np.array([8.0, 4.0, 2.0, 6.0, 8.0, 4.0, 2.0, 6.0])}
    # Rows 0 to 2 and 1 to 3, and 4 to 6 and 5 to 7.
    batch = slices_of(fields, 3, rows.kinds_of(fields) if layout == "kinds" else None)
    found = rw.to_transitions(batch)
    assert found.observation.tolist() == batch.data["observation"].tolist()
    assert found.mask.tolist() == [True] * 3 + [True, True, False] + [True] * 3 + [True, True, False]
    assert found.next_observation[found.mask].tolist() == [11, 12, 13, 12, 13] * 2
    assert found.discount[found.mask].tolist() == [1, 1, 0, 1, 0, 1, 1, 1, 1, 1]
    assert found.continues.tolist() == [True, True, False, True, False, False] * 2
    advantages = rw.returns.gae(batch, "value", gamma=0.5, lambda_=0.5).advantages
    # By hand, as in docs/explanation/steps.md: terminated, then truncated.
    assert advantages.tolist() == [-5.125, -0.5, 2, -0.5, 2, 0, -4.9375, 0.25, 5, 0.25, 5, 0]
    alone = rw.to_transitions(dataclasses.replace(batch, next=None, next_kinds=None))
    assert alone.mask.tolist() == [True, True, False] * 3 + [True, True]
    assert alone.discount[alone.mask].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]


def test_slices_whose_last_row_has_an_action() -> None:
    """Two terminated episodes of two actions; slices of three rows are the whole episodes."""
    kinds = np.array([FIRST | ACTION, ACTION | LAST | TERMINAL] * 2, np.uint8)
    steps = {"observation": np.arange(4), "action": np.arange(4), "reward": np.arange(4.0)}
    slices = SliceSampler(2, 3).each(find_trajectories(kinds), np.random.default_rng(0))
    batch = dataclasses.replace(gather(steps, slices, kinds), last_row="action")
    with_next = dataclasses.replace(
        batch, next={name: leaf[slices.next_rows] for name, leaf in steps.items()}, next_kinds=kinds[slices.next_rows]
    )
    for found in (rw.to_transitions(batch), rw.to_transitions(with_next)):
        assert (found.mask.tolist(), found.discount.tolist()) == ([True] * 4, [1, 0, 1, 0])
        assert found.next_observation.tolist() == [1, 1, 3, 3]
        assert found.continues.tolist() == [True, False, True, False]
    assert rw.to_transitions(dataclasses.replace(batch, last_row=None)).mask.tolist() == [True, False, True]
