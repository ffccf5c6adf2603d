"""Hidden tests of the package `slugs`."""

import slugs


def test_words():
    assert slugs.slugify("Hello, World!") == "hello-world"


def test_separator():
    assert slugs.slugify("a b  c", separator="_") == "a_b_c"


def test_accents():
    assert slugs.slugify("Crème Brûlée") == "creme-brulee"


def test_max_length():
    assert slugs.slugify("hello world", max_length=6) == "hello"


def test_nothing_left():
    assert slugs.slugify("!!!") == ""


def test_unique():
    assert slugs.unique(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]
