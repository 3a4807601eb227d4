"""`extras` of `record`: data of the policy, or of the environment's `info`, as fields of a row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import tree

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import Fit, as_array, fit, host_array
from reverb_writer.nests import at_leaf, check_same_leaves, join_paths, named_leaves

_FORMS = "a function of no arguments, or a function of `info`, that returns a nest"
_ADVICE = "Turn it into an array, a number or a string."


class Extras:
    """Calls the functions `extras` and `final_extras` of `record`; their results are copied."""

    def __init__(
        self,
        read: Callable[..., Any] | None,
        read_final: Callable[[Any], Any] | None,
        num_envs: int | None = None,
        *,
        has_info: bool = True,
    ) -> None:
        """Check the functions; their leaves are [N, ...] for `num_envs` = N environments.

        Args:
            read: `extras`, a function of no arguments or of one; None for no extras.
            read_final: `final_extras`, a function of final observations; None for zeros.
            num_envs: N, number of environments; None for one environment without a dimension N.
            has_info: whether the environment has infos.
        """
        takes_info = read is not None and _takes_info(read)
        if takes_info and not has_info:
            raise SpecError("`extras` must be a function of no arguments, because steps of dm_env have no `info`.")
        if read_final is not None and not callable(read_final):
            raise SpecError(f"`final_extras` must be a function of observations, got {type(read_final).__name__}.")
        if read_final is not None and read is None:
            raise SpecError("`final_extras` needs `extras`: the last row of an episode has the leaves of other rows.")
        self._read, self._read_final, self._num_envs = read, read_final, num_envs
        self._is_early = read is not None and not takes_info
        self._is_late = takes_info
        self.final_fields = None if read_final is None else self._final_fields

    def before(self) -> dict[str, Any]:
        """Return the fields of a step that does not look at `info`; call this before the environment moves."""
        return {"extras": self._checked(self._read())} if self._is_early and self._read is not None else {}

    def after(self, info: Any) -> dict[str, Any]:
        """Return the fields of a step that looks at `info`."""
        return {"extras": self._checked(self._read(info))} if self._is_late and self._read is not None else {}

    def _checked(self, nest: Any) -> Any:
        """Copy a nest of one row, or of N rows."""
        return tree.map_structure_with_path(self._checked_leaf, nest)

    def _checked_leaf(self, path: tuple[Any, ...], leaf: Any) -> Any:
        where = at_leaf("`extras`", "/".join(map(str, path)))
        array = as_array(_on_host(leaf), where, _ADVICE, copy=True)
        if self._num_envs is not None and array.shape[:1] != (self._num_envs,):
            raise StructureError(
                f"{where} has shape {array.shape}, expected ({self._num_envs}, ...): one row per environment."
            )
        return array

    def _final_fields(self, observation: Any, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of last rows: `fields`, which are zeros, with the results of `final_extras`."""
        assert self._read_final is not None  # noqa: S101  # else nothing calls this
        given, zeros = self._read_final(observation), fields["extras"]
        if isinstance(given, Mapping) and isinstance(zeros, Mapping):
            if surplus := [str(key) for key in given if key not in zeros]:
                raise StructureError(f"`final_extras` has {join_paths(surplus)}, which `extras` does not have.")
            given = {**zeros, **given}
        paths, leaves = named_leaves(given, "`final_extras`")
        names, likes = named_leaves(zeros, "`extras`")
        check_same_leaves("`final_extras`", paths, names, "`extras`")
        found = []
        for path, leaf, zero in zip(paths, leaves, likes, strict=True):
            where, like = at_leaf("`final_extras`", path), as_array(zero, "`extras`", _ADVICE)
            found.append(fit(_on_host(leaf), like.dtype, like.shape, where, "as in `extras`", Fit.LOSSLESS))
        return {**fields, "extras": tree.unflatten_as(zeros, found)}


def _on_host(leaf: Any) -> Any:
    """Return a tensor as an array of NumPy, and other leaves unchanged; strings keep their last zero characters."""
    return host_array(leaf) if hasattr(leaf, "detach") else leaf


def _takes_info(read: Any) -> bool:
    """Return whether `extras` is a function of `info`."""
    if not callable(read):
        raise SpecError(f"`extras` must be {_FORMS}, got {type(read).__name__}.")
    try:
        parameters = inspect.signature(read).parameters.values()
    except ValueError:  # a function written in C
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.default is one.empty and one.kind in (*positional, one.KEYWORD_ONLY)]
    if not needed:
        return False
    if len(needed) > 1 or needed[0].kind not in positional:
        raise SpecError(f"`extras` must be {_FORMS}; it needs {', '.join(one.name for one in needed)}.")
    return True
