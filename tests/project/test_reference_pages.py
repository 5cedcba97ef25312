"""The generated pages say what the program and params.yaml say."""

from pathlib import Path

import pytest
import reference_pages


@pytest.mark.parametrize(
    ("path", "text"), reference_pages.pages().items(), ids=lambda value: getattr(value, "name", "")
)
def test_a_generated_page_is_up_to_date(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, f"{path.name} differs from its source; call: make docs"


def test_an_option_comes_with_its_value_its_comment_and_the_papers_value() -> None:
    page = reference_pages.options_page(
        "# head\n\nict:  # of crops\n  removal: 0.5  # a|b; paper: 0.9 (words)\n  steps: 3\n", {"ict": {"removal": 0.5}}
    )
    assert "\n## `ict`\n\nof crops\n\n" in page
    assert "\n- `removal` (`0.5`, paper: 0.9 (words)): a|b\n- *`steps`* (`3`)\n" in page


def test_a_line_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"defaults\.yaml, line 2: expected 'section:'"):
        reference_pages.options_page("ict:\n    - 3\n", {})
