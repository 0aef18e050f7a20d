"""What is asked of the database, the same on SQLite and on a real PostgreSQL."""

import pytest

from tests.unit.fleet.machines.test_clearing import (
    test_failures_stay_longer_than_successes,
    test_files_of_live_attempts_are_needed,
    test_the_folder_of_a_job_that_was_pruned_goes_and_of_one_that_is_forgotten_stays,
    test_the_last_folder_of_a_job_that_goes_on_stays,
)

__all__ = [
    "test_failures_stay_longer_than_successes",
    "test_files_of_live_attempts_are_needed",
    "test_the_folder_of_a_job_that_was_pruned_goes_and_of_one_that_is_forgotten_stays",
    "test_the_last_folder_of_a_job_that_goes_on_stays",
]

pytestmark = pytest.mark.fleet
