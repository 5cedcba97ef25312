import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from ruamel.yaml import YAML

from realmops import config
from realmops.artifacts import write_json
from realmops.cli import main
from realmops.commands.params import rewritten
from realmops.config import PACKAGE, load_params, merge_options, parse_section, parse_setting, preset_path
from realmops.config_yaml import LARGEST_FILE, read_params, read_yaml
from realmops.options import SECTIONS, Options, Pretrain

ROOT = Path(__file__).parents[1]
PARAMS = ROOT / "params.yaml"
TEXT = ""  # a params.yaml with every option
for section, kind in SECTIONS.items():
    TEXT += f"{section}:\n"
    for key, field in kind.model_fields.items():
        TEXT += f"  {key}: {json.dumps(field.default)} # {field.description}\n"


@pytest.fixture
def params(tmp_path: Path) -> Path:
    """A params.yaml with every option."""
    path = tmp_path / "params.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def replaced(params: Path, old: str, new: str) -> Path:
    assert old in TEXT
    params.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    return params


def test_a_section_may_be_left_empty(tmp_path: Path) -> None:
    """Somebody takes all keys out of one: the defaults hold, and what is written into it later finds its place."""
    path = tmp_path / "params.yaml"
    path.write_text("sample:\nrun:\n  seed: 3\n")
    values = load_params(path)
    assert (values["run"]["seed"], values["sample"]) == (3, load_params(PARAMS)["sample"])
    text, changes = rewritten(path, [], ["sample.subjects=70"])
    path.write_text(text)
    assert changes == ["sample.subjects: 300 -> 70"]
    assert load_params(path)["sample"]["subjects"] == 70


def test_the_projects_params_are_whole_and_typed() -> None:
    values = load_params(PARAMS)
    assert list(values) == list(SECTIONS)
    for name, section in SECTIONS.items():
        parsed = parse_section(name, values[name])
        assert isinstance(parsed, section)
        assert parsed.model_dump() == values[name]


def test_values_are_the_same_as_yaml_as_json_and_however_a_number_is_written(params: Path) -> None:
    values = load_params(replaced(params, "retriever_learning_rate: 0.0002 ", "retriever_learning_rate: 5e-5 "))
    assert values["pretrain"]["retriever_learning_rate"] == 5e-5
    assert load_params(PARAMS, settings=["pretrain.retriever_learning_rate=5.0e-5"]) == values
    write_json(params, values)
    assert "5e-05" in params.read_text()
    assert load_params(params) == values


def test_every_option_has_a_valid_default() -> None:
    values = Options().model_dump()
    assert Options.model_validate(values) == Options()
    assert values == config.default_options()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  seed: 0 ",
            "  sed: 0 ",
            r"line 2: unknown key run\.sed; allowed keys are seed, device, .*; closest match: seed",
        ),
        ("ict:\n", "itc:\n", r"line \d+: unknown section 'itc'; sections are run, bert, .*; closest match: ict"),
        (
            """  device: "auto" """,
            "  device: gpu ",
            r"line 3: run\.device is 'gpu' \(str\); it must be 'auto', 'cpu' or",
        ),
        ("  heads: 4 ", "  heads: ", r"bert\.heads is None \(NoneType\); it must be a valid integer"),
        ("  heads: 4 ", "  heads: 0 ", r"bert\.heads is 0 \(int\); it must be greater than 0"),
        (
            "  subjects: 300 ",
            "  subjects: 59 ",
            r"sample\.subjects is 59 \(int\); it must be .*equal to 60",
        ),
        ("  dropout: 0.0 ", "  dropout: much ", r"bert\.dropout is 'much' \(str\); it must be a valid number"),
        (
            "  dropout: 0.0 ",
            "  dropout: -0.1 ",
            r"bert\.dropout is -0\.1 \(float\); it must be .*equal to 0",
        ),
        ("  dropout: 0.0 ", "  dropout: 1.5 ", r"bert\.dropout is 1\.5 \(float\); it must be less than or equal to 1"),
        ("  dropout: 0.0 ", "  dropout: .nan ", r"bert\.dropout is nan \(float\); it must be a finite number"),
        ("  dropout: 0.0 ", "  dropout: 1e999 ", r"bert\.dropout is inf \(float\); it must be a finite number"),
        ("  candidates: 8 ", "  candidates: 0 ", r"pretrain\.candidates is 0 \(int\); it must be greater than 0"),
    ],
)
def test_a_wrong_value_names_file_key_and_what_is_allowed(params: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_params(replaced(params, old, new))
    assert str(params) in str(error.value)
    assert type(error.value) is ValueError, "none of pydantic's"
    assert "\n" not in str(error.value), "one line"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("bert.heads", "4", r"is '4' \(str\); it must be a valid integer"),
        ("bert.heads", 4.0, r"is 4\.0 \(float\); it must be a valid integer"),
        ("bert.heads", True, r"is True \(bool\); it must be a valid integer"),
        ("bert.heads", 2**63, r"is 9223372036854775808 \(int\); it must be less than or equal to 9223372036854775807"),
        ("run.seed", 10**400, r" \(int\); it must be less than or equal to 9223372036854775807"),
        ("bert.dropout", 10**400, r" \(int\); it must be a valid number"),
        ("bert.dropout", True, r"is True \(bool\); it must be a valid number"),
        ("bert.dropout", "nan", r"is nan \(float\); it must be a finite number"),
        ("bert.dropout", b"0.5", r"is b'0\.5' \(bytes\); it must be a valid number"),
        ("retriever.init", b"small", r"is b'small' \(bytes\); it must be a valid string"),
        ("reader.copies", "true", r"is 'true' \(str\); it must be a valid boolean"),
        ("reader.copies", 0, r"is 0 \(int\); it must be a valid boolean"),
        ("run.device", None, r"is None \(NoneType\); it must be 'auto', 'cpu' or 'cuda'"),
        ("run.device", ["cpu"], r"is \['cpu'\] \(list\); it must be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_no_value_is_made_into_another_type(key: str, value: Any, expected: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ValueError, match=f"{expected}$") as error:
        parse_section(section, {**config.default_options()[section], name: value}, "here")
    assert str(error.value).startswith(f"here: {key} is ")
    assert type(error.value) is ValueError, "none of pydantic's"


@pytest.mark.parametrize(("value", "number"), [("5e-5", 5e-5), ("0.25", 0.25), (1, 1.0), (0, 0.0)])
def test_a_number_may_be_whole_or_in_quotation_marks(value: Any, number: float) -> None:
    parsed = parse_section("bert", {**config.default_options()["bert"], "dropout": value})
    assert (parsed.dropout, type(parsed.dropout)) == (number, float)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 2, "width": 0, "witdh": 1}, r"unknown key bert\.witdh; allowed keys are .*; closest match: width"),
        ({"dropout": 2, "width": 0}, r"bert\.width is 0"),
        ({"dropout": 2}, r"bert\.dropout is 2"),
        ({7: 1}, r"unknown key bert\.7; allowed keys are vocabulary, width, .*, dropout"),
    ],
)
def test_of_several_errors_an_unknown_key_comes_first_then_the_first_option(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^params: {message}"):
        parse_section("bert", config.default_options()["bert"] | changes)


def test_a_section_does_not_change_and_is_equal_to_another_of_the_same_values() -> None:
    first, second = (parse_section("run", config.default_options()["run"]) for _ in range(2))
    assert (first, hash(first)) == (second, hash(second))
    assert first != first.model_copy(update={"seed": 1})
    with pytest.raises(ValidationError, match="frozen"):
        first.seed = 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tower=bag", "head=cosine", "document_vectors=2"], r"vectors is 2: a bag has one .*document_vectors=1"),
        (
            ["pooling=cls", "document_vectors=2"],
            r"vectors is 2, and .*pooling=cls gives .* set retriever\.pooling=mean",
        ),
        (["tower=bag"], r"retriever\.tower is bag and retriever\.head is normalised: .* set retriever\.head=cosine"),
        (["tower=bag", "head=cosine", "embedding_width=0"], r"embedding_width is 0: .* retriever\.embedding_width=384"),
        (["head=release", "pooling=mean"], r"retriever\.pooling=mean .*set retriever\.pooling=cls and retriever\.proj"),
        (["head=release", "projection=identity", "embedding_width=0"], r"retriever\.head is release, .*=identity: the"),
        (["head=release", "projection=pca"], r"retriever\.head is release, .*=pca: the released code has a dense"),
        (["projection=identity", "embedding_width=64"], r"keeps the encoder's width of 128, .* is 64; set .*width=0"),
        (["projection=pca", "embedding_width=129"], r"have no more than 128 components; set .*embedding_width=128"),
        (["embedding_width=-1"], r"retriever\.embedding_width is -1 \(int\); it must be greater than or equal to 0"),
        (["pooling=max"], r"retriever\.pooling is 'max' \(str\); it must be 'auto', 'cls', 'mean' or 'last'"),
        (["tower=lstm"], r"retriever\.tower is 'lstm' \(str\); it must be 'bert' or 'bag'"),
        (["projection=none"], r"retriever\.projection is 'none' \(str\); it must be 'orthogonal', 'identity', 'pca'"),
    ],
)
def test_towers_that_make_no_sense_are_refused(params: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_params(params, settings=[f"retriever.{setting}" for setting in settings])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["bert.width=16", "bert.heads=3"], r"^bert\.width is 16; it must be a multiple of bert\.heads=3$"),
        (
            ["bert.positions=64"],
            r"^ict\.reader_wordpieces is 128, above the encoder's bert\.positions=64; lower ict\.r",
        ),
        (["reader.copies=false"], r"^reader\.apart is true and reader\.copies is false: .*; set reader\.copies=true"),
        (
            ["finetune.reader_wordpieces=65"],
            r"^finetune\.reader_wordpieces is 65, which leaves no room .*query_wordpieces=64; ",
        ),
    ],
)
def test_options_that_contradict_each_other_are_named(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_params(PARAMS, settings=settings)


def test_an_encoder_of_a_folder_has_its_own_shape() -> None:
    load_params(PARAMS, settings=["retriever.init=FOLDER", "bert.width=16", "bert.heads=3"])


@pytest.mark.parametrize(
    "settings",
    [
        ["tower=bag", "head=cosine", "embedding_width=384"],
        ["tower=bag", "head=cosine", "pooling=mean", "projection=identity"],
        ["projection=identity", "embedding_width=0", "head=cosine", "pooling=mean"],
        ["projection=identity", "embedding_width=128", "head=normalised"],
        ["projection=pca", "embedding_width=128"],
        ["head=release", "pooling=cls", "projection=random", "embedding_width=0"],
    ],
)
def test_towers_that_make_sense_are_taken(params: Path, settings: list[str]) -> None:
    """A bag looks at none of the options of an encoder."""
    load_params(params, settings=[f"retriever.{setting}" for setting in settings])


def test_the_width_of_an_encoder_in_a_folder_is_not_guessed(params: Path) -> None:
    load_params(
        params, settings=["retriever.projection=identity", "retriever.embedding_width=384", "retriever.init=FOLDER"]
    )


@pytest.mark.parametrize("text", ["", "run:\n  seed: 0\n", TEXT[: TEXT.index("tracking:\n")]])
def test_what_a_file_lacks_has_its_default(params: Path, text: str) -> None:
    params.write_text(text, encoding="utf-8")
    assert load_params(params) == config.default_options()


def test_a_file_of_differences_takes_what_is_written_into_it(params: Path) -> None:
    params.write_text("ict:\n  steps: 7  # few\n", encoding="utf-8")
    settings = ["ict.removal=0.5", "pretrain.lag=3"]
    values = load_params(params, settings=settings)
    assert values == merge_options({"ict": {"steps": 7, "removal": 0.5}, "pretrain": {"lag": 3}}, "")
    text, changes = rewritten(params, [], settings)
    assert changes == ["ict.removal: 0.9 -> 0.5", "pretrain.lag: 12 -> 3"]
    assert text == "ict:\n  steps: 7  # few\n  removal: 0.5\npretrain:\n  lag: 3\n"
    params.write_text(text, encoding="utf-8")
    assert load_params(params) == values


def test_the_projects_params_show_some_options_of_every_section_as_the_defaults_are() -> None:
    _, shown = read_params(PARAMS)
    assert shown.keys() == SECTIONS.keys(), "DVC follows the options by their sections"
    assert all(shown.values())
    assert load_params(PARAMS) == config.default_options()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  seed: 0\n  seed: 1\n", r"line 3: the key 'seed' is repeated; keep one"),
        ("run: {}\nbert: {}\nrun: {}\n", r"line 3: the key 'run' is repeated; keep one"),
        ("run: &a\n  seed: 0\nbert: *a\n", r"line 3: an alias \(\*name\) is not allowed; write the value"),
        ("run:\n  ? [1, 2]\n  : 3\n", r"line 2: a key must be a string, not a list or a mapping"),
        ("run:\n\tseed: 0\n", r"found character '\\t' that cannot start any token"),
        ("run: [1\n", r"params\.yaml: while parsing a flow sequence"),
        ("run: !!python/object/apply:os.system ['true']\n", r"could not determine a constructor"),
        ("run: 7\n", r"run is not a section; expected sections with keys, for example 'run:'"),
        ("- run\n", r"this is not a section; expected sections with keys"),
        ("[" * 5000, r"params\.yaml: "),
        ("a: {b: " * 3000, r"params\.yaml: "),
        ("run: \x00\n", r"params\.yaml: .*unacceptable character"),
    ],
)
def test_what_is_no_params_file_is_refused(params: Path, text: str, message: str) -> None:
    params.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_yaml(params)
    assert "\n" not in str(error.value), "one line"
    assert str(params) in str(error.value)


def test_bytes_that_are_no_text_are_refused(params: Path) -> None:
    params.write_bytes(b"run:\n  device: \xff\xfe\n")
    with pytest.raises(ValueError, match=r"params\.yaml: .*invalid start byte"):
        read_yaml(params)


def test_a_file_that_is_missing_or_too_large_is_refused(params: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.yaml does not exist; run in the project's folder"):
        read_yaml(params.with_name("gone.yaml"))
    params.write_bytes(b"#" * (LARGEST_FILE + 1))
    with pytest.raises(ValueError, match=r"has 1048577 bytes; a params file may have at most 1048576"):
        read_yaml(params)
    params.write_bytes(b"#" * LARGEST_FILE)
    assert read_yaml(params) == {}


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1.0e-5", 1e-5), ("3", 3.0), ("1E2", 100.0)])
def test_numbers_as_people_write_them(params: Path, text: str, value: float) -> None:
    """YAML 1.1 reads 1e-5 as a text; a learning rate of 3 is a number too."""
    values = load_params(params, settings=[f"tag.learning_rate={text}"])
    parsed = parse_section("tag", values["tag"])
    assert parsed.learning_rate == value
    assert type(parsed.learning_rate) is float


def test_presets_and_settings_lie_over_the_file_in_order(params: Path) -> None:
    first, second = params.with_name("first.yaml"), params.with_name("second.yaml")
    first.write_text("pretrain:\n  steps: 1\n  lag: 7\n")
    second.write_text("pretrain:\n  steps: 2\n")
    settings = ["pretrain.batch_size=3", "pretrain.batch_size=4"]
    values = load_params(params, presets=[first, second], settings=settings)
    parsed: Pretrain = parse_section("pretrain", values["pretrain"])
    assert (parsed.steps, parsed.lag, parsed.batch_size) == (2, 7, 4)
    assert parse_section("run", values["run"]) == parse_section("run", load_params(params)["run"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pretrain:\n  stpes: 1\n", r"preset\.yaml, line 2: unknown key pretrain\.stpes; allowed keys are steps"),
        ("pretrian:\n  steps: 1\n", r"preset\.yaml, line 1: unknown section 'pretrian'; sections are run"),
    ],
)
def test_a_preset_cannot_invent_keys(params: Path, text: str, message: str) -> None:
    preset = params.with_name("preset.yaml")
    preset.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_params(params, presets=[preset])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pretrain.stpes=1", r"--set pretrain\.stpes=1: unknown key pretrain\.stpes"),
        ("steps=1", r"--set 'steps=1' is not of the form section\.key=value; for example pretrain\.steps=100"),
        ("pretrain.steps", r"is not of the form section\.key=value"),
        (".steps=1", r"is not of the form section\.key=value"),
        ("pretrain.=1", r"is not of the form section\.key=value"),
        ("pretrain.steps=[1", r"--set 'pretrain\.steps=\[1': while parsing"),
        ("pretrain.steps=*a", r"an alias \(\*name\) is not allowed"),
        ("pretrain.steps={[1]: 2}", r"a key must be a string"),
        ("pretrain.steps=many", r"pretrain\.steps is 'many' \(str\); it must be a valid integer"),
    ],
)
def test_a_wrong_setting_is_named(params: Path, setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_params(params, settings=[setting])


def test_settings_are_read_as_yaml() -> None:
    assert parse_setting(" pretrain.steps =100") == {"pretrain": {"steps": 100}}
    assert parse_setting("retriever.init=a=b") == {"retriever": {"init": "a=b"}}
    assert parse_setting("ict.removal=1e-1") == {"ict": {"removal": 0.1}}
    assert parse_setting("tracking.enabled=false") == {"tracking": {"enabled": False}}


def test_values_are_laid_over_others_that_stay_as_they_are() -> None:
    base = merge_options({"run": {"seed": 1}}, "here")
    assert merge_options({"run": {"threads": 2}}, "here", base)["run"] == {**base["run"], "threads": 2}
    assert base == merge_options({"run": {"seed": 1}}, "here")


def test_presets_are_found_by_name_or_path(params: Path) -> None:
    folder = params.parent / "presets"
    (folder / "variants").mkdir(parents=True)
    (folder / "big.yaml").write_text("{}")
    (folder / "variants" / "orqa.yaml").write_text("{}")
    assert preset_path("big", params) == folder / "big.yaml"
    assert preset_path("variants/orqa", params) == folder / "variants" / "orqa.yaml"
    assert preset_path(str(folder / "big.yaml"), params) == folder / "big.yaml"
    assert preset_path("minilm", params) == PACKAGE / "presets" / "minilm.yaml"
    (folder / "minilm.yaml").write_text("{}")
    assert preset_path("minilm", params) == folder / "minilm.yaml", "a project's own comes first"
    with pytest.raises(
        ValueError, match=r"preset 'bog': neither a file nor one of the presets ablation, .*, big, .*minilm"
    ):
        preset_path("bog", params)


PRESETS = sorted((PACKAGE / "presets").rglob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_of_the_project_fits_its_params(preset: Path) -> None:
    assert load_params(PARAMS, presets=[preset]) != load_params(PARAMS), "a preset that changes nothing"


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_rewritten_file_says_the_same_and_keeps_its_comments(preset: Path, params: Path) -> None:
    settings = ["ict.learning_rate=1e-5", "snapshot.warmup=''"]
    values = load_params(params, presets=[preset], settings=settings)
    text, changes = rewritten(params, [str(preset)], settings)
    assert "ict.learning_rate: 0.0005 -> 1e-05" in changes
    params.write_text(text, encoding="utf-8")
    written = load_params(params)
    assert all(parse_section(name, written[name]) == parse_section(name, values[name]) for name in SECTIONS)
    comments = [line.split("#", 1)[1] for line in TEXT.splitlines() if "#" in line]
    assert [line.split("#", 1)[1] for line in text.splitlines() if "#" in line] == comments
    assert rewritten(params, [str(preset)], settings) == (text, [])
    assert rewritten(params, [], []) == (text, [])


def test_other_presets_take_the_place_of_those_before_and_edits_stay(params: Path) -> None:
    def write(*words: str) -> list[str]:
        result = CliRunner().invoke(main, ["params", "--params", str(params), "--write", *words])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    folder = PACKAGE / "presets"
    params.write_text("run:\n  seed: 0\nict:\n  steps: 60\ntag:\n  hidden: 0.2  # ours\n")
    said = write("--preset", "squad", "--preset", "minilm", "--set", "run.seed=3")
    assert {"presets: none -> squad, minilm", "run.seed: 0 -> 3", "ict.learning_rate: 0.0005 -> 3e-05"} < {*said}
    assert params.read_text() == (
        "presets: [squad, minilm]\nrun:\n  seed: 3\nict:\n  steps: 60\ntag:\n  hidden: 0.2  # ours\n"
    )
    both = [folder / "squad.yaml", folder / "minilm.yaml"]
    assert load_params(params) == load_params(PARAMS, presets=both, settings=["run.seed=3", "tag.hidden=0.2"])
    said = write("--preset", "squad")
    assert {"presets: squad, minilm -> squad", "ict.steps: 60 -> 50", "ict.learning_rate: 3e-05 -> 0.0005"} < {*said}
    assert params.read_text() == ("presets: [squad]\nrun:\n  seed: 3\nict:\n  steps: 50\ntag:\n  hidden: 0.2  # ours\n")
    assert load_params(params) == load_params(PARAMS, presets=both[:1], settings=["run.seed=3", "tag.hidden=0.2"])


@pytest.mark.parametrize("text", ["presets: squad\n", "presets: [1]\n", "presets: {squad: 1}\n"])
def test_presets_are_a_list_of_names(params: Path, text: str) -> None:
    params.write_text(text)
    with pytest.raises(ValueError, match=r"line 1: presets is .*; it must be a list of names, for example \[squad\]"):
        load_params(params)
    params.write_text("presets: [squod]\n")
    with pytest.raises(ValueError, match="preset 'squod': neither a file nor one of the presets"):
        load_params(params)


def test_params_are_printed_and_only_written_on_demand(params: Path) -> None:
    def call(*options: str) -> str:
        result = CliRunner().invoke(main, ["params", "--params", str(params), "--set", "run.seed=7", *options])
        assert result.exit_code == 0, result.output
        return result.output

    assert call() == TEXT.replace("seed: 0 ", "seed: 7 ", 1)
    assert params.read_text(encoding="utf-8") == TEXT
    assert call("--write") == "run.seed: 0 -> 7\n"
    assert params.read_text(encoding="utf-8") == TEXT.replace("seed: 0 ", "seed: 7 ", 1)
    assert "no changes" in call("--write")


@pytest.mark.parametrize("value", ["010", "1:30", "no", "0x10", "1_000"])
def test_what_yaml_1_1_takes_for_a_number_or_a_truth_value_is_text(value: str) -> None:
    assert parse_setting(f"run.seed={value}") == {"run": {"seed": value}}
    with pytest.raises(ValueError, match=r"run\.seed"):
        load_params(PARAMS, settings=[f"run.seed={value}"])


NUMBERS = {"10": 10, "-3": -3, "1e-5": 1e-5, "5.0e-4": 5e-4, ".5": 0.5, "true": True, "0": 0, "null": None, "~": None}


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_and_truth_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    assert parse_setting(f"a.b={text}") == {"a": {"b": value}}


@pytest.mark.parametrize(
    ("key", "value"),
    [*(("ict.learning_rate", value) for value in (1e-5, 2.5e-7, 1e20, 3.0))]
    + [("tag.train", text) for text in ("no", "1:30", "010", "null", "~", "1e5", "a: b", "#x", "-", "é", "2020-01-01")],
)
def test_dvc_reads_a_written_value_as_this_program_does(tmp_path: Path, key: str, value: float | str) -> None:
    path, (section, _, name) = tmp_path / "params.yaml", key.partition(".")
    path.write_text(rewritten(PARAMS, [], [f"{key}={value!r}"])[0], encoding="utf-8")
    assert read_params(path)[1][section][name] == YAML(typ="safe").load(path)[section][name] == value
