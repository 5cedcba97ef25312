import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from realmops.artifacts import write_json
from realmops.cli import main
from realmops.commands.params import rewritten
from realmops.config import (
    PACKAGE,
    load_params,
    parse_options,
    parse_sections,
    parse_setting,
    preset_path,
)
from realmops.config_yaml import LARGEST_FILE, read_params, read_yaml
from realmops.options import SECTIONS, Options

PARAMS = Path(__file__).parents[1] / "params.yaml"
PRESETS = sorted((PACKAGE / "presets").rglob("*.yaml"))
TEXT = ""  # a params.yaml with every option
for section, kind in SECTIONS.items():
    TEXT += f"{section}:\n"
    for key, field in kind.model_fields.items():
        TEXT += f"  {key}: {json.dumps(field.default)} # {field.description}\n"


@pytest.fixture
def params(tmp_path: Path) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_params_yaml_shows_options_of_every_section_with_their_defaults() -> None:
    _, shown = read_params(PARAMS)
    assert shown.keys() == SECTIONS.keys(), "DVC follows the options by their sections"
    assert all(shown.values())
    assert load_params(PARAMS) == Options()


@pytest.mark.parametrize("text", ["", "run:\n", "run:\n  seed: 0\n", TEXT[: TEXT.index("tracking:\n")]])
def test_missing_options_have_their_defaults(params: Path, text: str) -> None:
    params.write_text(text, encoding="utf-8")
    assert load_params(params) == Options()


def test_values_are_the_same_in_yaml_and_json(params: Path) -> None:
    values = load_params(params, settings=["pretrain.retriever_learning_rate=5e-5", "tag.learning_rate=3"])
    assert (values.pretrain.retriever_learning_rate, values.tag.learning_rate) == (5e-5, 3.0)
    write_json(params, values.model_dump())
    assert "5e-05" in params.read_text()
    assert load_params(params) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  sed: 0\n", r"line 2: unknown key run\.sed; allowed keys are seed, device, .*; closest match: seed"),
        ("itc: {}\n", r"line 1: unknown section 'itc'; sections are run, bert, .*; closest match: ict"),
        ("run:\n\n  device: gpu\n", r"line 3: run\.device is 'gpu' \(str\); it must be 'auto', 'cpu' or 'cuda'"),
        ("bert: {heads: }\n", r"bert\.heads is None \(NoneType\); it must be a valid integer"),
        ("bert: {heads: 0}\n", r"bert\.heads is 0 \(int\); it must be greater than 0"),
        ("sample: {subjects: 59}\n", r"sample\.subjects is 59 \(int\); it must be .*equal to 60"),
        ("bert: {dropout: much}\n", r"bert\.dropout is 'much' \(str\); it must be a valid number"),
        ("bert: {dropout: 1.5}\n", r"bert\.dropout is 1\.5 \(float\); it must be less than or equal to 1"),
        ("bert: {dropout: .nan}\n", r"bert\.dropout is nan \(float\); it must be a finite number"),
        ("bert: {dropout: 1e999}\n", r"bert\.dropout is inf \(float\); it must be a finite number"),
        ("run:\n  seed: 0\n  seed: 1\n", r'line 2.* found duplicate key "seed" with value "1"'),
        ("run: &a\n  seed: 0\nbert: *a\n", r"params\.yaml: an alias \(\*name\) is not allowed; write the value"),
        ("run:\n  ? [1, 2]\n  : 3\n", r"unknown key run\.\(1, 2\); allowed keys are"),
        ("run: [1\n", r"params\.yaml: while parsing a flow sequence"),
        ("run: !!python/object/apply:os.system ['true']\n", r"could not determine a constructor"),
        ("run: 7\n", r"run is not a section; expected sections with keys, for example 'run:'"),
        ("- run\n", r"this is not a section; expected sections with keys"),
        ("a: {b: " * 3000, r"params\.yaml: "),
        ("run: \x00\n", r"params\.yaml: .*unacceptable character"),
        ("presets: squad\n", r"line 1: presets is 'squad'; it must be a list of names, for example \[squad\]"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(params: Path, text: str, message: str) -> None:
    params.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        load_params(params)
    assert str(params) in str(error.value)
    assert type(error.value) is ValueError, "none of pydantic's"
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_too_large_or_no_text_is_refused(params: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.yaml does not exist; run in the project's folder"):
        read_yaml(params.with_name("gone.yaml"))
    params.write_bytes(b"run:\n  device: \xff\xfe\n")
    with pytest.raises(ValueError, match=r"params\.yaml: .*invalid start byte"):
        read_yaml(params)
    params.write_bytes(b"#" * (LARGEST_FILE + 1))
    with pytest.raises(ValueError, match=r"has 1048577 bytes; a params file may have at most 1048576"):
        read_yaml(params)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("bert.heads", "4", r"is '4' \(str\); it must be a valid integer"),
        ("bert.heads", 4.0, r"is 4\.0 \(float\); it must be a valid integer"),
        ("bert.heads", True, r"is True \(bool\); it must be a valid integer"),
        ("bert.heads", 2**63, r"it must be less than or equal to 9223372036854775807"),
        ("bert.dropout", 10**400, r" \(int\); it must be a valid number"),
        ("bert.dropout", True, r"is True \(bool\); it must be a valid number"),
        ("bert.dropout", "nan", r"is nan \(float\); it must be a finite number"),
        ("reader.copies", "true", r"is 'true' \(str\); it must be a valid boolean"),
        ("reader.copies", 0, r"is 0 \(int\); it must be a valid boolean"),
        ("run.device", None, r"is None \(NoneType\); it must be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_no_value_is_converted_to_another_type(key: str, value: Any, expected: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ValueError, match=f"^here: {key} is .*{expected.removeprefix('is ')}$"):
        parse_sections(("here", {section: {name: value}}))


@pytest.mark.parametrize(("value", "number"), [("5e-5", 5e-5), ("0.25", 0.25), (1, 1.0), (0, 0.0)])
def test_a_number_is_integral_or_in_quotation_marks(value: Any, number: float) -> None:
    parsed = parse_sections(("here", {"bert": {"dropout": value}})).bert
    assert (parsed.dropout, type(parsed.dropout)) == (number, float)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 2, "width": 0, "witdh": 1}, r"unknown key bert\.witdh; allowed keys are .*; closest match: width"),
        ({"dropout": 2, "width": 0}, r"bert\.width is 0"),
        ({7: 1}, r"unknown key bert\.7; allowed keys are vocabulary, width, .*, dropout"),
    ],
)
def test_an_unknown_key_precedes_other_errors(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^here: {message}"):
        parse_sections(("here", {"bert": changes}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("tower=bag", r"retriever\.tower is bag and retriever\.head is normalised; set retriever\.head=cosine"),
        ("tower=bag head=cosine embedding_width=0", r"embedding_width is 0; set retriever\.embedding_width=384"),
        ("tower=bag head=cosine document_vectors=2", r"vectors is 2; set .*document_vectors=1"),
        ("pooling=cls document_vectors=2", r"vectors is 2, and .*pooling=cls gives .* set retriever\.pooling=mean"),
        ("head=release pooling=mean", r"retriever\.pooling=mean .*set retriever\.pooling=cls and retriever\.proj"),
        ("head=release projection=first", r"retriever\.head is release, .*=first: BERT's pooler reads"),
        ("projection=identity embedding_width=64", r"keeps the encoder's width of 128, .* is 64; set .*width=0"),
        ("projection=first embedding_width=129", r"embedding_width is 129: .*; set .*embedding_width=128 or less"),
        ("bert.width=16 bert.heads=3", r"^bert\.width is 16; it must be a multiple of bert\.heads=3$"),
        ("bert.positions=64", r"^pretrain\.reader_wordpieces is 128, above the encoder's bert\.positions=64; lower"),
        ("reader.copies=false", r"^reader\.apart is true and reader\.copies is false; set both to true"),
        ("finetune.reader_wordpieces=65", r"wordpieces is 65, which leaves no room .*query_wordpieces=64; raise"),
        ("reader.init=NAME", r"^reader\.init is NAME, a reader of answer spans, with pretrain\.steps=300 .*; set"),
    ],
)
def test_options_that_contradict_each_other_are_refused(settings: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_params(PARAMS, settings=[s if "." in s else f"retriever.{s}" for s in settings.split()])


@pytest.mark.parametrize(
    "settings",
    [
        "tower=bag head=cosine embedding_width=384 pooling=mean projection=identity",
        "projection=identity embedding_width=0 head=cosine pooling=mean",
        "projection=first embedding_width=128",
        "head=release pooling=cls embedding_width=0",
        "projection=identity embedding_width=384 init=FOLDER",  # whose width is not yet known
        "init=FOLDER bert.width=16 bert.heads=3",
    ],
)
def test_options_that_fit_are_accepted(settings: str) -> None:
    load_params(PARAMS, settings=[s if "." in s else f"retriever.{s}" for s in settings.split()])


def test_presets_and_settings_override_the_file_in_order(params: Path) -> None:
    first, second = params.with_name("first.yaml"), params.with_name("second.yaml")
    first.write_text("pretrain:\n  steps: 1\n  lag: 7\n")
    second.write_text("pretrain:\n  steps: 2\n")
    values = load_params(params, presets=[first, second], settings=["ict.steps=3", "ict.steps=4"])
    expected = {"pretrain": {"steps": 2, "lag": 7}, "ict": {"steps": 4}}
    assert values == parse_options(("", expected))
    second.write_text("\npretrain:\n  stpes: 1\n")
    with pytest.raises(ValueError, match=r"second\.yaml, line 3: unknown key pretrain\.stpes; allowed keys are steps"):
        load_params(params, presets=[second])


def test_options_are_replaced_by_name_and_the_place_of_indexes_is_in_no_key() -> None:
    options = Options()
    placed = options.replace({"pretrain.builder": "external", "pretrain.exchange": "shared"})
    assert (placed.get("pretrain.builder"), placed.get("pretrain").exchange) == ("external", "shared")
    assert options.pretrain.builder == "child"
    assert placed.cache_key() == options.cache_key()
    assert placed.replace({"pretrain.steps": 5}).cache_key() != options.cache_key()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pretrain.stpes=1", r"--set pretrain\.stpes=1: unknown key pretrain\.stpes"),
        ("steps=1", r"--set 'steps=1' is not of the form section\.key=value; for example pretrain\.steps=100"),
        ("pretrain.steps", r"is not of the form section\.key=value"),
        ("pretrain.=1", r"is not of the form section\.key=value"),
        ("pretrain.steps=[1", r"--set 'pretrain\.steps=\[1': while parsing"),
        ("run.seed=1:30", r"run\.seed is '1:30' \(str\); it must be a valid integer"),
    ],
)
def test_a_wrong_setting_is_named(params: Path, setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_params(params, settings=[setting])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10), ("-3", -3), ("1e-5", 1e-5), ("5.0e-4", 5e-4), (".5", 0.5), ("true", True), ("~", None),
        ("010", 10), ("1:30", "1:30"), ("no", "no"), ("a=b", "a=b"), ("", ""),
    ],
)  # fmt: skip
def test_settings_are_yaml_1_2(text: str, value: Any) -> None:
    assert parse_setting(f" a.b ={text}") == {"a": {"b": value}}


def test_presets_are_found_by_name_or_path(params: Path) -> None:
    folder = params.parent / "presets"
    (folder / "variants").mkdir(parents=True)
    (folder / "big.yaml").write_text("{}")
    (folder / "variants" / "orqa.yaml").write_text("{}")
    assert preset_path("big", params) == preset_path(str(folder / "big.yaml"), params) == folder / "big.yaml"
    assert preset_path("variants/orqa", params) == folder / "variants" / "orqa.yaml"
    assert preset_path("minilm", params) == PACKAGE / "presets" / "minilm.yaml"
    (folder / "minilm.yaml").write_text("{}")
    assert preset_path("minilm", params) == folder / "minilm.yaml", "a project's own comes first"
    params.write_text("presets: [bog]\n")
    with pytest.raises(ValueError, match=r"preset 'bog': neither a file nor one of the presets .*, big, .*minilm"):
        load_params(params)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_params_with_a_preset_written_in_keep_values_and_comments(preset: Path, params: Path) -> None:
    settings = ["ict.learning_rate=1e-5", "snapshot.warmup="]
    values = load_params(params, presets=[preset], settings=settings)
    assert values != load_params(params, settings=settings), "a preset changes something"
    text, changes, options = rewritten(params, [str(preset)], settings)
    assert "ict.learning_rate: 0.0005 -> 1e-05" in changes
    params.write_text(text, encoding="utf-8")
    assert load_params(params) == values == options
    comments = [[line.split("#", 1)[1] for line in t.splitlines() if "#" in line] for t in (TEXT, text)]
    assert comments[0] == comments[1]
    assert rewritten(params, [str(preset)], settings) == (text, [], values)


def test_other_presets_replace_earlier_ones_and_edits_remain(params: Path) -> None:
    def write(*words: str) -> list[str]:
        result = CliRunner().invoke(main, ["params", "--params", str(params), "--write", *words])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    both = [PACKAGE / "presets" / f"{name}.yaml" for name in ("squad", "minilm")]
    params.write_text("run:\n  seed: 0\nict:\n  steps: 60\ntag:\n  steps: 7  # ours\n")
    printed = write("--preset", "squad", "--preset", "minilm", "--set", "run.seed=3", "--set", "sample.subjects=70")
    assert {"presets: none -> squad, minilm", "run.seed: 0 -> 3", "ict.learning_rate: 0.0005 -> 3e-05"} < {*printed}
    assert params.read_text() == (
        "presets: [squad, minilm]\nrun:\n  seed: 3\nict:\n  steps: 60\n"
        "tag:\n  steps: 7  # ours\nsample:\n  subjects: 70\n"
    )
    settings = ["run.seed=3", "tag.steps=7", "sample.subjects=70"]
    assert load_params(params) == load_params(PARAMS, presets=both, settings=settings)
    printed = write("--preset", "squad")
    assert {"presets: squad, minilm -> squad", "ict.steps: 60 -> 50", "ict.learning_rate: 3e-05 -> 0.0005"} < {*printed}
    assert load_params(params) == load_params(PARAMS, presets=both[:1], settings=settings)


def test_params_are_printed_and_only_written_on_demand(params: Path) -> None:
    def call(*options: str) -> str:
        result = CliRunner().invoke(main, ["params", "--params", str(params), "--set", "run.seed=7", *options])
        assert result.exit_code == 0, result.output
        return result.output

    changed = TEXT.replace("seed: 0 ", "seed: 7 ", 1)
    assert (call(), params.read_text(encoding="utf-8")) == (changed, TEXT)
    assert (call("--write"), params.read_text(encoding="utf-8")) == ("run.seed: 0 -> 7\n", changed)
    assert "no changes" in call("--write")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("ict.learning_rate", number) for number in (1e-5, 2.5e-7, 1e20, 3.0)),
        *(("tag.train", text) for text in ("no", "1:30", "010", "null", "1e5", "a: b", "#x", "-", "é", "2020-01-01")),
    ],
)
def test_dvc_reads_a_written_value_as_this_program_does(params: Path, key: str, value: Any) -> None:
    params.write_text(rewritten(PARAMS, [], [f"{key}={value!r}"])[0], encoding="utf-8")
    section, name = key.split(".")
    parsed = read_params(params)[1], YAML(typ="safe").load(params)
    assert [values[section][name] for values in parsed] == [value] * 2


def test_presets_name_folders_of_models_with_a_dot() -> None:
    """A folder that is missing is otherwise a name that anybody may publish on the hub."""
    presets = [read_params(path)[1] for path in (PACKAGE / "presets").rglob("*.yaml") if path.name != "variants.yaml"]
    inits = [keys["init"] for preset in presets for keys in preset.values() if "init" in keys]
    owners = {init.partition("/")[0] for init in inits if "/" in init}
    assert owners == {".", "google-bert", "sentence-transformers"}
