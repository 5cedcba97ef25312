"""The questions of a new project: files of train, dev and test, a random split, or the judgements of a BEIR folder."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from realmops.artifacts import digest_of
from realmops.questions.question_sets import Question, read_questions, split_by_hash, to_json_line
from realmops.starter.new_project import Project, path_in_params

SPLITS = "train", "dev", "test"
MIN_QUESTIONS = 60  # fewer are not split into train, dev and test
HELD_OUT = 10  # a tenth of the judged training questions is for dev, if no split is


def add_questions(project: Project, files: Sequence[Path]) -> None:
    """Set questions.train, dev and test to files with these names, else to a random split in questions/."""
    if file_of_split := match_splits(files):
        for split, path in file_of_split.items():
            unanswerable: list[Question] = []
            count = len(read_questions([path], format="auto", unanswerable=unanswerable)) + len(unanswerable)
            project.lines.append(f"questions.{split}: {count} of {path}")
            project.put(f"questions.{split}", path_in_params(project, path))
        return
    unanswerable = []
    questions = read_questions(files, format="auto", unanswerable=unanswerable)
    if len(questions) < MIN_QUESTIONS:
        raise ValueError(
            f"{', '.join(map(str, files))}: {len(questions)} questions; at least {MIN_QUESTIONS} are needed for train, "
            "dev and test: give more, or leave --questions out, and measure by 'realmops ask --from FILE'"
        )
    questions += unanswerable
    for split, part in split_by_hash(questions).items():
        name = _add_split(project, split, part)
        project.lines.append(f"questions.{split}: {len(part)} of {len(questions)}, in {name}")


def add_judged_questions(project: Project, judged: Mapping[str, Sequence[Question]]) -> None:
    """Set the questions to the splits of a BEIR folder, all or only test."""
    parts = {"dev" if name in ("validation", "valid") else name: part for name, part in judged.items()}
    if "test" not in parts and "dev" in parts:
        parts["test"] = parts.pop("dev")
    if "test" not in parts:
        raise ValueError(
            f"qrels has the splits {', '.join(judged) or '(none)'}; one of test, dev and validation is needed"
        )
    train = parts.get("train", ())
    if "dev" not in parts and len(train) > 1:
        by_hash = sorted(train, key=lambda question: digest_of(question.question))
        parts["dev"] = by_hash[: -(-len(train) // HELD_OUT)]
        parts["train"] = [question for question in train if question not in parts["dev"]]
    chosen = SPLITS if "train" in parts and "dev" in parts else SPLITS[-1:]
    for split in chosen:
        name = _add_split(project, split, parts[split])
        project.lines.append(f"questions.{split}: {len(parts[split])} with relevance judgements, in {name}")
    if chosen == SPLITS:
        project.presets.append("judged")


def _add_split(project: Project, split: str, questions: Sequence[Question]) -> str:
    name = f"questions/{split}.jsonl"
    project.files[name] = b"".join(map(to_json_line, questions)).decode()
    project.put(f"questions.{split}", name)
    return name


def match_splits(files: Sequence[Path]) -> dict[str, Path]:
    """Return a file for every split, by a whole word in its name (``latest_dev.jsonl`` is dev), else {}."""
    splits = {path: [split for split in SPLITS if split in re.split(r"[\W_]+", path.name.lower())] for path in files}
    if {names[0] for names in splits.values() if len(names) == 1} != {*SPLITS}:
        return {}
    if len(files) > len(SPLITS):
        raise ValueError(
            f"--questions: {', '.join(map(str, files))}: expected one file for each of {', '.join(SPLITS)}, with "
            "exactly one of these words in its name; give these three, or files without such names"
        )
    return {names[0]: path for path, names in splits.items()}
