"""Hidden tests of the package `semver`."""

import pytest

import semver


def test_parse():
    version = semver.parse("1.20.3")
    assert (version.major, version.minor, version.patch, version.pre) == (1, 20, 3, ())


def test_order_of_releases():
    assert semver.parse("1.9.0") < semver.parse("1.10.0") < semver.parse("2.0.0")


def test_bump():
    assert str(semver.bump(semver.parse("1.2.3"), "major")) == "2.0.0"


def test_bump_patch():
    assert str(semver.bump(semver.parse("1.2.3-rc.1"), "patch")) == "1.2.4"
    with pytest.raises(ValueError):
        semver.bump(semver.parse("1.2.3"), "other")


def test_text_of_a_pre_release():
    assert str(semver.parse("1.0.0-alpha.1")) == "1.0.0-alpha.1"


def test_order_of_pre_releases():
    names = [
        "1.0.0-1",
        "1.0.0-alpha",
        "1.0.0-alpha.1",
        "1.0.0-alpha.2",
        "1.0.0-alpha.beta",
        "1.0.0",
    ]
    assert sorted(map(semver.parse, reversed(names))) == [semver.parse(n) for n in names]


@pytest.mark.parametrize("text", ["1.2", "01.2.3", "1.2.3-", "1.2.3-01", "v1.2.3", ""])
def test_errors(text):
    with pytest.raises(ValueError):
        semver.parse(text)
