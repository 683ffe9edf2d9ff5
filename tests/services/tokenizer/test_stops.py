"""The output ends before the first stop string, for any cut of the pieces."""

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.text_stream import StopMatcher


def run(
    stops: list[str], pieces: list[str], includes_stop: bool = False, num_mute: int = 0
) -> tuple[str, bool]:
    """The first ``num_mute`` pieces are mute."""
    matcher = StopMatcher(stops, includes_stop)
    text = ""
    for number, piece in enumerate(pieces):
        text += matcher.push(piece, is_exempt=number < num_mute)
        if matcher.match is not None:
            return text, True
    return text + matcher.flush(), False


def expected(
    stops: list[str], text: str, includes_stop: bool = False, num_mute: int = 0
) -> tuple[str, bool]:
    """By brute force: the first character that completes a stop string, after the first
    ``num_mute``."""
    for end in range(num_mute + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if includes_stop else end - len(max(found, key=len))], True
    return text, False


few_letters = st.text("ab", min_size=1, max_size=5)


@given(
    st.lists(few_letters, min_size=1, max_size=4),
    st.lists(st.text("ab", max_size=4)),
    st.booleans(),
    st.integers(0, 3),
)
def test_the_text_is_cut_where_brute_force_cuts_it(
    stops: list[str], pieces: list[str], includes_stop: bool, num_mute: int
):
    num_mute_chars = len("".join(pieces[:num_mute]))
    cut = expected(stops, "".join(pieces), includes_stop, num_mute_chars)
    text, has_stopped = run(stops, pieces, includes_stop, num_mute)
    assert (text, has_stopped) == cut


def test_only_a_possible_start_of_a_stop_string_is_held_back():
    matcher = StopMatcher(["STOP"])
    assert matcher.push("one ST") == "one "
    assert matcher.push("A") == "STA"
    assert matcher.push("STO") == ""
    assert matcher.flush() == "STO"


def test_without_stop_strings_text_passes_untouched():
    assert run([], ["a", "b"]) == ("ab", False)
