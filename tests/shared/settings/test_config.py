"""File below environment below flags; one clear line for each error."""

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from cli.supervisor import child_environment
from shared.errors import ConfigError
from shared.settings.environment import unread_variables
from shared.settings.gateway import GatewayConfig
from shared.settings.load import load_settings
from shared.settings.scheduler import SchedulerConfig
from shared.settings.serve import ServeConfig
from shared.settings.speculative import SpeculativeConfig
from shared.settings.tokenizer import TokenizerConfig
from shared.settings.worker import WorkerConfig

ROOT = Path(__file__).parents[3]
VLLM_FILE = """\
model: /models/qwen
served-model-name: [one, two]
max-model-len: 8192
max_num_seqs: 64
port: 7000
all2all-backend: naive
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(VLLM_FILE)
    return str(path)


def test_flags_win_over_the_environment_and_that_over_the_file(file: str, monkeypatch):
    monkeypatch.setenv("SHOAL_MAX_NUM_SEQS", "32")
    monkeypatch.setenv("SHOAL_MAX_MODEL_LEN", "4096")
    config = load_settings(
        ServeConfig, ["--config", file, "--max-model-len", "2048"], "shoal serve"
    )
    assert (config.max_model_len, config.max_num_seqs, config.port) == (2048, 32, 7000)
    assert config.served_model_name == ["one", "two"]


def test_the_file_can_be_named_in_the_environment(file: str, monkeypatch):
    monkeypatch.setenv("SHOAL_CONFIG", file)
    assert load_settings(GatewayConfig, [], "shoal gateway").port == 7000


def test_a_foreign_key_is_logged_by_name(file: str, caplog):
    load_settings(ServeConfig, ["--config", file], "shoal serve")
    assert "all2all-backend has no effect: kernels are not a choice" in caplog.text
    assert "max-model-len" not in caplog.text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--port", "70000"], "port: '70000'.*65535"),
        (["--max-num-seqs", "0"], "max-num-seqs: '0'.*greater than 0"),
        (["--gateways", "65"], "gateways: '65'.*64"),
        (["--max-priority-boost", "1001"], "max-priority-boost: '1001'.*1000"),
        (["--ttft-ms", "0"], "ttft-ms: '0'.*greater than 0"),
        (["--tpot-ms", "86400001"], "tpot-ms: '86400001'.*86400000"),
        (["--dtype", "int3"], "dtype: 'int3'.*bfloat16"),
        (["--config", "/no/such/file"], "no such file: /no/such/file"),
        (["--gpu-memory-utilization", "1.5"], "gpu-memory-utilization: '1.5'.*1"),
        (["--max-num-partial-prefills", "0"], "max-num-partial-prefills: '0'.*equal to 1"),
        (["--max-long-partial-prefills", "0"], "max-long-partial-prefills: '0'.*equal to 1"),
        (
            ["--max-long-partial-prefills", "3"],
            "max-long-partial-prefills: 3: at most.*prefills, 2",
        ),
        (["--max-model-len", "9" * 400 + "k"], "max-model-len: '9+k': must be a valid integer"),
        (["--served-model-name", "[" * 100_000], "expected a JSON list"),
        (["--pooler-config", '{"a":' * 100_000], "expected a JSON object"),
        (
            ["--long-prefill-token-threshold", "-1"],
            "long-prefill-token-threshold: '-1'.*equal to 0",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_limit(flags: list[str], text: str):
    with pytest.raises(ConfigError, match=text):
        load_settings(ServeConfig, flags, "shoal serve")


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path):
    (tmp_path / "bad.yaml").write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_settings(ServeConfig, ["--config", str(tmp_path / "bad.yaml")], "shoal serve")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--max-modl-len", "5"],
            r"unrecognized arguments: --max-modl-len 5; did you mean --max-model-len\?",
        ),
        (["--dtyp=x", "--blok-size=3"], r".*; did you mean --dtype, --block-size\?"),
        (["/models/qwen"], r".*; did you mean --model /models/qwen\?"),
        (["--port"], r"argument --port: expected one argument\."),
    ],
)
def test_a_flag_that_does_not_exist_is_an_error_of_one_line_with_one_that_does(
    capsys, flags: list[str], text: str
):
    with pytest.raises(ConfigError, match=f"^{text} See shoal serve --help$"):
        load_settings(ServeConfig, flags, "shoal serve")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SHOAL_MAX_NUM_SEQ", "is not a setting; did you mean SHOAL_MAX_NUM_SEQS\\?"),
        ("SHOAL_REPLICATE", "is not a setting"),
    ],
)
def test_an_unknown_variable_is_an_error_with_the_nearest_known_one(monkeypatch, name, text):
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=f"^{name} {text}$"):
        load_settings(GatewayConfig, [], "shoal gateway")


def test_a_foreign_variable_is_logged_by_serve_alone(caplog, monkeypatch):
    monkeypatch.setenv("SHOAL_SWAP_SPACE", "4")
    monkeypatch.setenv("SHOAL_DATA_PARALLEL_SIZE", "2")
    monkeypatch.setenv("SHOAL_SUPERVISOR_FD", "9")
    monkeypatch.setenv("SHOAL_GATEWAY_SERVICE_HOST", "10.0.0.1")
    config = load_settings(ServeConfig, [], "shoal serve")
    assert config.workers == 2
    assert caplog.messages == [
        "SHOAL_DATA_PARALLEL_SIZE is workers here",
        "SHOAL_SWAP_SPACE has no effect: kv-offloading-size alone keeps KV blocks outside the"
        " cache",
    ]
    assert not {"SHOAL_SWAP_SPACE", "SHOAL_DATA_PARALLEL_SIZE"} & child_environment(config).keys()


def test_no_service_of_the_stack_warns_of_the_variables_of_the_stack(monkeypatch):
    files = [ROOT / "docker-compose.yml", ROOT / ".env.example", *ROOT.glob("compose/*.yml")]
    names = {name for file in files for name in re.findall(r"\bSHOAL_[A-Z_]+\b", file.read_text())}
    assert {"SHOAL_PUBLISH", "SHOAL_TAG", "SHOAL_MODEL"} <= names
    for name in names:
        monkeypatch.setenv(name, "1")
    assert not unread_variables(ServeConfig.model_fields.keys())


def test_only_settings_of_serve_reach_its_services(file: str, monkeypatch):
    monkeypatch.setenv("SHOAL_CONFIG", file)
    config = load_settings(ServeConfig, ["--dtype", "float32"], "shoal serve")
    environment = child_environment(config)
    for name in [name for name in environment if name.startswith("SHOAL_")]:
        monkeypatch.setenv(name, environment[name])
    monkeypatch.delenv("SHOAL_CONFIG")
    worker = load_settings(WorkerConfig, [], "shoal worker")
    assert (worker.dtype, worker.max_model_len, worker.max_num_seqs) == ("float32", 8192, 64)
    assert worker.block_size == WorkerConfig().block_size
    assert "SHOAL_BLOCK_SIZE" not in environment


@pytest.mark.parametrize("key", ["max-num-seqs", "max-model-len"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_a_boolean_in_the_file_is_no_number(tmp_path: Path, key: str, value: str):
    (tmp_path / "config.yaml").write_text(f"{key}: {value}\n")
    with pytest.raises(ConfigError, match=f"{key}: '{value}': must be a valid integer"):
        load_settings(WorkerConfig, ["--config", str(tmp_path / "config.yaml")], "worker")


@pytest.mark.parametrize("key", ["ssl-ca-certs", "ssl_ca_certs"])
def test_a_setting_that_protects_is_refused_while_it_would_protect_nothing(tmp_path: Path, key):
    (tmp_path / "config.yaml").write_text(f"{key}: secret\n")
    with pytest.raises(ConfigError, match="remove it to serve without") as caught:
        load_settings(ServeConfig, ["--config", str(tmp_path / "config.yaml")], "shoal serve")
    assert "secret" not in str(caught.value)


def test_a_key_of_a_file_that_is_no_setting_is_an_error_with_the_nearest(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("prot: 3\n")
    with pytest.raises(ConfigError, match="prot is not a setting; did you mean port\\?"):
        load_settings(ServeConfig, ["--config", str(tmp_path / "config.yaml")], "shoal serve")


@pytest.mark.parametrize("num", ["two", "0", "65", "-1"])
def test_a_wrong_number_of_workers_is_one_error(num: str):
    with pytest.raises(ConfigError, match=f"^workers: '{num}': .* from 1 to 64, or auto$"):
        load_settings(ServeConfig, [f"--workers={num}"], "shoal serve")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a: [1\n", "is not YAML"),
        (b"model: secret\xff\n", "is not UTF-8$"),
        (b"[" * 3000, "is nested too deeply$"),
    ],
)
def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path, content: bytes, text: str):
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        load_settings(ServeConfig, ["--config", str(tmp_path / "bad.yaml")], "shoal serve")


def test_null_and_names_with_spaces_reach_the_services(tmp_path: Path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text('max-model-len: null\nserved-model-name: ["my model", "b"]\n')
    environment = child_environment(
        load_settings(ServeConfig, ["--config", str(path)], "shoal serve")
    )
    assert "SHOAL_MAX_MODEL_LEN" not in environment
    monkeypatch.setenv("SHOAL_SERVED_MODEL_NAME", environment["SHOAL_SERVED_MODEL_NAME"])
    assert load_settings(TokenizerConfig, [], "shoal tokenizer").served_model_name == [
        "my model",
        "b",
    ]


def test_names_of_one_process_are_no_settings_of_the_mesh(monkeypatch):
    monkeypatch.setenv("SHOAL_ADMIN_PORT", "9000")
    with pytest.raises(ConfigError, match="admin-port is a setting of one service alone"):
        load_settings(ServeConfig, [], "shoal serve")


def test_a_setting_of_several_services_is_the_same_in_each():
    services: list[Any] = [GatewayConfig, TokenizerConfig, SchedulerConfig, WorkerConfig]
    for one, other in combinations(services, 2):
        for name in one.model_fields.keys() & other.model_fields.keys():
            assert repr(one.model_fields[name]) == repr(other.model_fields[name]), name


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--nnodes=3", "--master-addr=h"], "3 hosts cannot have the same number of 4 ranks"),
        (["--nnodes=2", "--node-rank=2", "--master-addr=h"], "node-rank: 2: nnodes is 2"),
        (["--nnodes=2"], "nnodes needs master-addr"),
        (["--nnodes=2", "--master-addr=tcp://h"], "master-addr: 'tcp://h': must be a host's name"),
        (
            ["--nnodes=2", "--master-addr=h", "--device=cuda"],
            "several hosts are supported on CPUs only",
        ),
        (["--nnodes=2", "--master-addr=h", "--no-insecure-tcp"], "nnodes needs keys"),
        (["--nnodes=2", "--master-addr=h", "--workers=2"], "workers: 2: with nnodes"),
    ],
)
def test_hosts_that_cannot_share_ranks_are_refused(flags: list[str], text: str) -> None:
    four = ["--tensor-parallel-size=4", "--insecure-tcp"]
    with pytest.raises(ConfigError, match=text):
        load_settings(ServeConfig, [*four, *flags], "shoal serve")
    for address in ("h", "10.0.0.1", "fe80::1"):
        good = ["--nnodes=2", "--node-rank=1", f"--master-addr={address}"]
        assert list(load_settings(ServeConfig, [*four, *good], "shoal").ranks_of_host) == [2, 3]


def test_serve_starts_no_mesh_of_encoders() -> None:
    with pytest.raises(ConfigError, match="worker-role: encoder: is for `shoal worker`"):
        load_settings(ServeConfig, ["--worker-role=encoder"], "shoal serve")


def test_a_second_host_needs_to_know_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match="node-rank: 1: nnodes is 1, so the last is 0"):
        load_settings(WorkerConfig, ["--node-rank=1"], "shoal worker")


def keys_of(config: GatewayConfig) -> list[str]:
    return [key.get_secret_value() for key in config.api_key]


@pytest.mark.parametrize(
    ("written", "keys"),
    [("one", ["one"]), ("one,two", ["one", "two"]), ('["one,two", "three"]', ["one,two", "three"])],
)
def test_keys_are_given_alike_in_the_environment_the_flag_and_the_file(
    tmp_path: Path, monkeypatch, written: str, keys: list[str]
):
    assert keys_of(load_settings(GatewayConfig, ["--api-key", written], "shoal gateway")) == keys
    (tmp_path / "config.yaml").write_text(f"api-key: {written}\n")
    assert (
        keys_of(load_settings(ServeConfig, ["--config", f"{tmp_path}/config.yaml"], "shoal serve"))
        == keys
    )
    monkeypatch.setenv("SHOAL_API_KEY", written)
    assert keys_of(load_settings(GatewayConfig, [], "shoal gateway")) == keys


@pytest.mark.parametrize(
    "written",
    ["", "[]", "''", "null", "secret,", "'[secret'", "['', 'secret']", '["secret word"]', "7",
     "s\u00e9cret", "secret" * 43],
)  # fmt: skip
def test_keys_that_would_guard_nothing_are_refused_and_not_quoted(tmp_path: Path, written: str):
    (tmp_path / "config.yaml").write_text(f"api-key: {written}\n")
    with pytest.raises(ConfigError, match="api-key") as caught:
        load_settings(ServeConfig, ["--config", str(tmp_path / "config.yaml")], "shoal serve")
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize("written", ["[secret", "*secret", "!secret", "'secret"])
def test_a_key_that_breaks_the_yaml_is_not_quoted(tmp_path: Path, written: str):
    (tmp_path / "config.yaml").write_text(f"port: 7000\napi-key: {written}\n")
    with pytest.raises(ConfigError, match=r"not YAML: line [23], column \d+$"):
        load_settings(ServeConfig, ["--config", str(tmp_path / "config.yaml")], "shoal serve")


def test_an_empty_key_in_the_environment_does_not_open_the_server(monkeypatch):
    monkeypatch.setenv("SHOAL_API_KEY", "")
    with pytest.raises(ConfigError, match="api-key: expected 1 to 256"):
        load_settings(GatewayConfig, [], "shoal gateway")


def test_settings_in_a_line_show_no_key():
    config = ServeConfig(api_key=["secret"])
    assert "api-key=" in config.describe()
    assert "secret" not in config.describe() + repr(config)


def test_a_switch_that_is_on_is_turned_off_by_its_no():
    assert load_settings(SchedulerConfig, [], "shoal").enable_prefix_caching
    assert not load_settings(
        SchedulerConfig, ["--no-enable-prefix-caching"], "shoal"
    ).enable_prefix_caching


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"method": "eagel"}', "method: must be 'mtp', 'eagle3', 'ngram'"),
        (
            '{"method": "eagle3"}',
            "model: method eagle3 needs the folder or name of its draft model",
        ),
        ('{"method": "eagle3", "model": "a", "draft_vocab_size": 9}', "is for method mtp; method"),
        ('{"num_speculative_tokens": 17}', "num_speculative_tokens: must be less than"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens: must be a valid int"),
        ('{"prompt_lookup_min": 5, "prompt_lookup_max": 4}', "prompt_lookup_min 5 is above"),
        ('{"draft_vocab_size": 0}', "draft_vocab_size: must be greater than or equal to 1"),
        ('{"method": "ngram", "draft_vocab_size": 9}', "draft_vocab_… is for method mtp; method"),
        ('{"method": "none", "draft_vocab_file": "f"}', "draft_vocab_… is for method mtp; method"),
        ('{"modle": "x"}', "modle: no such key; known keys: method, num_spec"),
        ("mtp", 'expected a JSON object (in a file a mapping), such as {"method": "ngram"}'),
        ("null", "expected a JSON object"),
    ],
)
def test_a_wrong_speculative_config_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(WorkerConfig, [f"--speculative-config={text}"], "test")
    assert "speculative-config" in str(error.value)
    assert message in str(error.value)


def test_a_speculative_config_is_json_as_a_flag_and_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4}'
    wanted = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    loaded = load_settings(WorkerConfig, [f"--speculative-config={text}"], "test")
    assert loaded.speculative_config == wanted
    monkeypatch.setenv("SHOAL_SPECULATIVE_CONFIG", text)
    assert load_settings(WorkerConfig, [], "test").speculative_config == wanted


@pytest.mark.parametrize("key", ["num_speculative_tokens", "num-speculative-tokens"])
def test_a_speculative_config_is_a_mapping_in_a_file_and_replaced_as_a_whole(
    tmp_path: Path, key: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"speculative-config:\n  method: ngram\n  {key}: 5\n")
    flags = [f"--config={path}"]
    wanted = SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    assert load_settings(WorkerConfig, flags, "test").speculative_config == wanted
    replaced = load_settings(
        WorkerConfig, [*flags, '--speculative-config={"adaptive": false}'], "test"
    )
    assert replaced.speculative_config == SpeculativeConfig(adaptive=False)


@pytest.mark.parametrize(
    ("given", "lens"),
    [({}, (2, 4)), ({"prompt_lookup_max": 1}, (1, 1)), ({"prompt_lookup_min": 6}, (6, 6)),
     ({"prompt_lookup_min": 3}, (3, 4)), ({"prompt_lookup_max": 9}, (2, 9))],
)  # fmt: skip
def test_a_lookup_length_that_is_not_given_follows_the_other(
    given: dict[str, Any], lens: tuple[int, int]
) -> None:
    assert SpeculativeConfig(**given).lookup_lens == lens
