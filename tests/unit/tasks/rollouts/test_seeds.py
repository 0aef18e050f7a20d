"""Seeds: a function of what is drawn, distinct for all that is distinct, and the same for ever."""

from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.rollouts.seeds import derive, evaluation_seed, member_seed

NUMBERS = st.integers(0, 2**40)
PLACES = st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)


def test_derived_seeds_never_change():
    """A run that is resumed with a later release must draw what it would have drawn."""
    assert derive("a", 1) == 9484037261928657086
    assert member_seed(0, 0, 0) == 10880533986507347724
    assert member_seed(7, 12, 3, 1, 2) == 16740792441481916158
    assert evaluation_seed(0, 5, 1) == evaluation_seed(0, 5, 1, 0) == 5184117073476335492


@given(PLACES, PLACES)
def test_different_places_have_different_seeds(one, other):
    assert (member_seed(*one) == member_seed(*other)) == (one == other)


def test_members_of_all_groups_of_a_step_are_distinct():
    """Also where two draws are of the same example: the draw is what counts."""
    seeds = [member_seed(0, draw, member) for draw in range(100) for member in range(64)]
    assert len(set(seeds)) == len(seeds)


def test_evaluation_shares_no_seed_with_training():
    training = {member_seed(0, draw, member) for draw in range(200) for member in range(8)}
    evaluation = {evaluation_seed(0, index, sample) for index in range(200) for sample in range(8)}
    assert len(evaluation) == 1600
    assert not training & evaluation
