"""Hidden tests of the package `tries`."""

import pytest

import tries


def test_words():
    trie = tries.Trie(["car", "cart"])
    assert "car" in trie and "ca" not in trie and "carts" not in trie


def test_with_prefix():
    assert tries.Trie(["dog", "cart", "car"]).with_prefix("ca") == ["car", "cart"]


def test_length_counts_words_once():
    assert len(tries.Trie(["a", "a", "b"])) == 2


def test_remove():
    trie = tries.Trie(["car", "cart"])
    trie.remove("car")
    assert "car" not in trie and "cart" in trie and len(trie) == 1
    with pytest.raises(KeyError):
        trie.remove("car")


def test_longest_prefix():
    trie = tries.Trie(["a", "abc"])
    assert trie.longest_prefix("abcd") == "abc" and trie.longest_prefix("abx") == "a"


def test_no_prefix_and_empty_word():
    assert tries.Trie(["b"]).longest_prefix("abc") is None
    assert tries.Trie([""]).longest_prefix("abc") == ""
