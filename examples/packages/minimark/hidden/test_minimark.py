"""Hidden tests of the package `minimark`."""

import minimark


def test_paragraphs():
    assert minimark.to_html("one\ntwo\n\nthree") == "<p>one two</p>\n<p>three</p>"


def test_heading():
    assert minimark.to_html("# Title\n\ntext") == "<h1>Title</h1>\n<p>text</p>"


def test_lower_headings():
    assert minimark.to_html("### Deep") == "<h3>Deep</h3>"


def test_list():
    assert minimark.to_html("- a\n- b") == "<ul><li>a</li><li>b</li></ul>"


def test_emphasis():
    assert minimark.to_html("**b** and *i*") == "<p><strong>b</strong> and <em>i</em></p>"


def test_code_is_left_alone():
    assert minimark.to_html("`a*b*` <x>") == "<p><code>a*b*</code> &lt;x&gt;</p>"


def test_links():
    assert minimark.to_html("[t](http://x/y)") == '<p><a href="http://x/y">t</a></p>'


def test_titles():
    assert minimark.titles("# A\n\ntext\n\n## B") == [(1, "A"), (2, "B")]
