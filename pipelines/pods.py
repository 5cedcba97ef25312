"""Configuration of the pods of all pipelines; everything that differs between clusters is a parameter."""

from dataclasses import dataclass
from pathlib import Path

from kfp import dsl, kubernetes

from realmops import config
from realmops.cluster import VOLUME
from realmops.cluster.packed_options import pack_options

PARAMS = Path(__file__).parents[1] / "params.yaml"
OPTIONS = pack_options(config.load_params(PARAMS))
RUNS = f"{VOLUME}/runs"
USER = 10001  # user and group in the image
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN")
STORE_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")  # of the task that fetches inputs
STORE_SETTINGS = ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
SETTINGS = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "HF_HUB_OFFLINE")
HOURS = {  # timeout of a running pod, by component, without the time that it is pending
    "guard": 0.5, "inputs": 48, "scale-builder": 0.5, "promote": 24, "table": 24, "sample": 24, "snapshot": 48,
    "tag": 48, "cloze": 24, "evaluate": 48, "refresh": 168,
    "ict": 336, "pretrain": 336, "finetune": 336, "variant": 336,
}  # fmt: skip
RETRIES = 2
BACKOFF = "60s"
MAX_BACKOFF = f"{4 * 336 * 3600}s"  # from the first attempt to the start of the last, with all timeouts and pauses
QUEUE = ""  # Kueue's queue, from ``python -m pipelines --queue NAME``
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOKEN_LABEL = "access-ml-pipeline"  # selects the PodDefault that mounts a token for the Kubeflow Pipelines API
# pod affinity of the index builders selects it (k8s/components/single-node); KFP accepts no parameter for a label
CLAIM_LABEL = "realmops/claim", "realmops-data"


def environment_names(names: tuple[str, ...]) -> dict[str, str]:
    """Map keys to environment variables; MLflow's get a prefix, because Kubeflow Pipelines may set them itself."""
    return {name: f"REALMOPS_{name}" if name.startswith("MLFLOW_") else name for name in names}


@dataclass(frozen=True)
class Pods:
    """Configuration of the pods of one pipeline; the fields are pipeline parameters of the same names."""

    image: str
    volume: str
    settings: str
    secret: str
    cpu: str
    cpu_request: str
    memory: str
    memory_request: str
    accelerator: str
    accelerators: str
    node_selector: dict
    tolerations: list
    affinity: dict

    @property
    def limits(self) -> str:
        """Resource limits as a task input: KFP passes to a group of tasks only the inputs of its tasks, not limits."""
        cpu, memory = f"cpu {self.cpu_request} to {self.cpu}", f"memory {self.memory_request} to {self.memory}"
        return f"{cpu}, {memory}, {self.accelerators} {self.accelerator}"

    def configure(
        self, task: dsl.PipelineTask, *, trains: bool = False, uses_api: bool = False, reads_store: bool = False
    ) -> dsl.PipelineTask:
        """Set image, volume, settings, affinity, timeout and retries of a task.

        A task that trains also gets limits, accelerators and nodes. A task that uses the Kubeflow Pipelines API gets a
        token and no retries, one that reads a store of inputs its credentials.
        """
        task.set_container_image(self.image)
        task.set_caching_options(False)  # stages check themselves whether they are up to date
        kubernetes.mount_pvc(task, pvc_name=self.volume, mount_path=VOLUME)
        kubernetes.empty_dir_mount(task, volume_name="tmp", mount_path="/tmp")
        kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
        settings, secrets = (SETTINGS + STORE_SETTINGS, SECRETS + STORE_SECRETS) if reads_store else (SETTINGS, SECRETS)
        kubernetes.use_config_map_as_env(task, self.settings, environment_names(settings), optional=True)
        kubernetes.use_secret_as_env(task, self.secret, environment_names(secrets), optional=True)
        kubernetes.add_pod_label(task, *CLAIM_LABEL)
        kubernetes.add_node_affinity_json(task, node_affinity_json=self.affinity)
        kubernetes.set_timeout(task, int(3600 * HOURS[task.component_spec.name]))
        if QUEUE:
            kubernetes.add_pod_label(task, QUEUE_LABEL, QUEUE)
        if uses_api:
            kubernetes.add_pod_label(task, TOKEN_LABEL, "true")
        else:
            task.set_retry(RETRIES, backoff_duration=BACKOFF, backoff_factor=2.0, backoff_max_duration=MAX_BACKOFF)
        if trains:
            task.set_cpu_limit(self.cpu).set_memory_limit(self.memory)
            # without requests a pod requests its limits, which do not fit on a node with two cores
            task.set_cpu_request(self.cpu_request).set_memory_request(self.memory_request)
            task.set_accelerator_type(self.accelerator).set_accelerator_limit(self.accelerators)
            kubernetes.add_node_selector_json(task, node_selector_json=self.node_selector)
            kubernetes.add_toleration_json(task, toleration_json=self.tolerations)
        return task
