"""The generated pages say what the program and params.yaml say."""

from pathlib import Path

import pytest
import reference_pages


@pytest.mark.parametrize(
    ("path", "text"), reference_pages.pages().items(), ids=lambda value: getattr(value, "name", "")
)
def test_a_generated_page_is_up_to_date(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, f"{path.name} differs from its source; call: make docs"


def test_an_option_has_its_default_its_sentence_and_the_papers_value() -> None:
    page = reference_pages.options_page({"bert": {"width": 64}})
    assert "\n## `evaluate`\n\nEvaluation" in page
    assert "\n- `width` (`128`, paper: 768): for small\n- *`layers`* (`2`, paper: 12): for small\n" in page


def test_an_option_of_params_has_its_sentence_as_comment() -> None:
    text = reference_pages.commented_params("# Ours\n\nict: # x\n  steps: 7  # few\n  learning_rate: 5.0e-4\n")
    assert text == (
        "# Ours\n\nict: # x\n  steps: 7                 # maximum training steps of the retriever; paper: 100000\n"
        "  learning_rate: 5.0e-4    # paper: 1e-4\n"
    )
