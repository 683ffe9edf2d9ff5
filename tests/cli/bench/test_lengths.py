import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.lengths import MAX_LENGTH, Lengths

counts = st.integers(1, MAX_LENGTH)
lengths = st.one_of(
    st.builds(Lengths, st.just("fixed"), counts),
    st.tuples(counts, counts).map(lambda pair: Lengths("uniform", *sorted(pair))),
    st.builds(Lengths, st.just("normal"), counts, st.integers(0, MAX_LENGTH)),
    st.builds(Lengths, st.just("lognormal"), counts, st.integers(0, 10)),
)


@given(lengths, st.integers(0, 2**32 - 1))
def test_drawn_lengths_are_at_least_one_and_at_most_the_limit(each: Lengths, seed: int):
    drawn = each.draw(50, np.random.default_rng(seed))
    assert len(drawn) == 50
    assert all(type(length) is int and 1 <= length <= MAX_LENGTH for length in drawn)
    if each.kind == "uniform":
        assert all(each.first <= length <= each.second for length in drawn)
    assert drawn == each.draw(50, np.random.default_rng(seed))


@given(lengths)
def test_parsing_inverts_formatting(each: Lengths):
    assert Lengths.parse(str(each)) == each


def test_each_form_has_the_middle_that_it_names():
    rng = np.random.default_rng(0)
    assert set(Lengths.parse("7").draw(9, rng)) == {7}
    assert set(Lengths.parse("uniform:3,5").draw(1000, rng)) == {3, 4, 5}
    assert np.mean(Lengths.parse("normal:100,10").draw(9000, rng)) == pytest.approx(100, rel=0.01)
    assert np.median(Lengths.parse("lognormal:100,1").draw(9000, rng)) == pytest.approx(
        100, rel=0.1
    )


WRONG = """
0 -1 1.5 x nan 1000001 1,2 uniform uniform: uniform:1 uniform:5,3 uniform:1.5,2 uniform:1,2,3
normal:10 normal:10,-1 normal:nan,1 normal:10,nan lognormal:0,1 lognormal:9,11 fixed:3 zipf:1,2
"""


@pytest.mark.parametrize("text", ["", *WRONG.split()])
def test_a_malformed_length_is_refused_by_its_text(text: str):
    with pytest.raises(ValueError, match=f"^'{text}'"):
        Lengths.parse(text)
