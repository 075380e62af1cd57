"""How rows may be spread over experts."""

# name: rows of each expert
GROUP_SIZES: dict[str, tuple[int, ...]] = {
    "one row": (0, 0, 1, 0),
    "one each": (1, 1, 1, 1),
    "none in the middle": (5, 0, 0, 9),
    "all in one": (0, 40, 0, 0),
    "uneven": (1, 17, 4, 130),
    "no rows": (0, 0, 0, 0),
    "one expert": (13,),
}
