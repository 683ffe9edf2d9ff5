"""Values that tools and forms are filled with: known ones, and invented ones that teach copying."""

from random import Random

NAMES = ("Ada", "Bob", "Carla", "David", "Emma", "Frank", "Grace", "Hugo", "Ida", "Jonas",
         "Alice", "Jane", "John", "Kim", "Lena", "Maria", "Noah", "Olga", "Paul", "Rosa",
         "Tom")  # fmt: skip
CITIES = ("Paris", "Berlin", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Madrid", "Delhi", "Bern",
          "London", "Boston", "New York", "San Francisco", "Los Angeles", "Vienna", "Prague",
          "Dublin", "Athens", "Seoul", "Beijing", "Sydney", "Toronto", "Munich")  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "today",
        "tomorrow")  # fmt: skip
EVENTS = ("concert", "meeting", "party", "science fair", "lunch", "workshop", "football match")
THINGS = (
    "apple",
    "chair",
    "bread",
    "lamp",
    "book",
    "phone",
    "ticket",
    "coffee",
    "shirt",
    "bicycle",
)
INVENTED_SHARE = 0.5
OPENINGS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "br", "st", "tr")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
ENDINGS = ("", "", "n", "r", "s", "l", "x", "nd")


def invented(rng: Random) -> str:
    """Return a word of two or three syllables that hardly any text holds."""
    syllables = (rng.choice(OPENINGS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 3)))
    return "".join(syllables) + rng.choice(ENDINGS)


def proper(rng: Random, known: tuple[str, ...]) -> str:
    """Return a known or an invented name."""
    return invented(rng).capitalize() if rng.random() < INVENTED_SHARE else rng.choice(known)


def identifier(rng: Random, words: list[str]) -> str:
    """Return a name such as a program gives to a function or a field."""
    parts = [rng.choice(words) if rng.random() < 0.8 else invented(rng) for _ in range(2)]
    return "_".join(parts[: rng.choice((1, 2, 2))])
