"""What is asked of the database, the same on SQLite and on a real PostgreSQL."""

import pytest

from tests.unit.fleet.files.test_clearing import (
    disk,
    test_a_right_goes_with_its_blob,
    test_a_right_to_what_is_sent_again_while_it_is_cleared_away_stays,
    test_a_week_of_each_gpu_is_kept_of_machines_that_have_left_too,
    test_only_what_nothing_names_goes,
    test_pruning_is_what_the_events_say,
    test_rows_of_processes_that_were_killed_long_ago_go,
    test_what_a_job_or_an_attempt_needs_is_named,
)

__all__ = [
    "disk",
    "test_a_right_goes_with_its_blob",
    "test_a_right_to_what_is_sent_again_while_it_is_cleared_away_stays",
    "test_a_week_of_each_gpu_is_kept_of_machines_that_have_left_too",
    "test_only_what_nothing_names_goes",
    "test_pruning_is_what_the_events_say",
    "test_rows_of_processes_that_were_killed_long_ago_go",
    "test_what_a_job_or_an_attempt_needs_is_named",
]

pytestmark = pytest.mark.fleet
