"""Facts for the judgement: of the model's inputs and outputs, of the optimizer's groups, and by witnesses."""

from __future__ import annotations

import numpy as np
import pytest

from wandb_gradwatch._measure.columns import NUM_COLUMNS
from wandb_gradwatch.snapshot import Snapshot


def of_names(names: str, **facts: list[list[float]]) -> Snapshot:
    """A snapshot with these one-letter names, and facts of every sample and name."""
    num_samples = len(next(iter(facts.values()))) if facts else 1
    rows = np.ones((num_samples, len(names), NUM_COLUMNS))
    per_parameter = {name: np.array(values) for name, values in facts.items()}
    return Snapshot(np.arange(num_samples), tuple(names), rows, per_parameter=per_parameter)


def test_facts_of_parameters_follow_their_names_through_merge_and_select() -> None:
    merged = of_names("a", rate=[[1.0]]).merge(of_names("ab", rate=[[2.0, 3.0], [4.0, 5.0]], other=[[6.0, 7.0]] * 2))
    nan = np.nan
    np.testing.assert_array_equal(merged.per_parameter["rate"], [[1.0, nan], [2.0, 3.0], [4.0, 5.0]])
    np.testing.assert_array_equal(merged.per_parameter["other"], [[nan, nan], [6.0, 7.0], [6.0, 7.0]])
    np.testing.assert_array_equal(merged.sample(-1).per_parameter["rate"], [[4.0, 5.0]])


def test_groups_of_parameters_have_no_facts_of_parameters() -> None:
    assert of_names("ab", rate=[[1.0, 2.0]]).by_group(lambda _: "all").per_parameter == {}


def test_facts_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"per_parameter\['rate'\] must be \[S, P\] = \(1, 2\), but is \(1, 1\)"):
        of_names("ab", rate=[[1.0]])
