"""Compares the values of validations: which is the best, and when to stop without a better one."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from megakit.errors import UserError


class BestValue:
    """Holds the best value of the column that `--best-by` names.

    Args:
        column: A column of metrics.csv that begins with `val_`, or `last`.
        stop_after: The number of validations in a row without a better value after which training
            stops; None: never.
        choose: `min` or `max` for each validated value, by its name without `val_`.

    Raises:
        UserError: There is no validated value of this name.
    """

    def __init__(
        self, column: str, stop_after: int | None, choose: Mapping[str, Callable[..., float]]
    ) -> None:
        columns = {f"val_{name}": function for name, function in choose.items()}
        if column not in (*columns, "last"):
            raise UserError(
                f"--best-by {column}: there is no such validated value. "
                f"There are {', '.join([*columns, 'last'])}."
            )
        self.column, self.stop_after = column, stop_after
        self.choose = columns.get(column, min)
        self.value, self.waited = math.nan, 0

    def is_better(self, values: Mapping[str, float]) -> bool:
        """Takes the values of a validation; returns whether they are better than all before."""
        value = values.get(self.column, math.nan)
        known = [one for one in (self.value, value) if not math.isnan(one)]
        better = bool(known) and value == self.choose(known) != self.value
        if better:
            self.value = value
        self.waited = 0 if better else self.waited + 1
        return better

    def should_stop(self) -> bool:
        """Returns whether the last validations have not been better."""
        return self.stop_after is not None and self.waited >= self.stop_after

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value, and how long ago it was, for a checkpoint."""
        return {"value": self.value, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.value, self.waited = float(state["value"]), int(state["waited"])
