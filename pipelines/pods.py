"""What the pods of all pipelines have in common; everything that differs between clusters is a parameter."""

from dataclasses import dataclass
from pathlib import Path

from kfp import dsl, kubernetes

from realmops import config
from realmops.cluster.options import packed

PARAMS = Path(__file__).parents[1] / "params.yaml"
OPTIONS = packed(config.load(PARAMS))
VOLUME = "/realmops"
RUNS = f"{VOLUME}/runs"
USER = 10001  # of the image
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN")
SETTINGS = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "HF_HUB_OFFLINE")
HOURS = {  # that a pod may run, by component; to wait for a node does not count
    "guard": 0.5, "scale-builder": 0.5, "promote": 24, "table": 24, "sample": 24, "snapshot": 48, "tag": 48,
    "evaluate": 48, "refresh": 168, "ict": 336, "pretrain": 336, "finetune": 336, "variant": 336,
}  # fmt: skip
TRIES_AGAIN = 2
PAUSE = "60s"
LONGEST = f"{4 * 336 * 3600}s"  # from the first try to the beginning of the last: all tries to their ends, and pauses
QUEUE = ""  # Kueue's, from ``python -m pipelines --queue NAME``; none without it
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOKEN_LABEL = "access-ml-pipeline"  # by it a PodDefault gives a pod a token for the pipelines' API
# by it index builders go to the node of these pods (k8s/components/single-node); KFP takes no parameter for a label
CLAIM_LABEL = "realmops/claim", "realmops-data"


def renamed(names: tuple[str, ...]) -> dict[str, str]:
    """Keys, each with the variable that it becomes: MLflow's own names may be set by Kubeflow Pipelines itself."""
    return {name: f"REALMOPS_{name}" if name.startswith("MLFLOW_") else name for name in names}


@dataclass(frozen=True)
class Pods:
    """How the pods of one pipeline are placed; the fields are parameters of the pipeline, by the same names."""

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
        """An input for a task: KFP hands a group of tasks only what one of them takes as an input, limits are none."""
        cpu, memory = f"cpu {self.cpu_request} to {self.cpu}", f"memory {self.memory_request} to {self.memory}"
        return f"{cpu}, {memory}, {self.accelerators} {self.accelerator}"

    def placed(self, task: dsl.PipelineTask, *, trains: bool = False, asks: bool = False) -> dsl.PipelineTask:
        """Give a task image, volume, settings, nodes, its time and other tries.

        One that trains also gets limits, accelerator and nodes for that. One that asks the pipelines' API, a token; it
        has no other try.
        """
        task.set_container_image(self.image)
        task.set_caching_options(False)  # a stage knows itself whether there is anything to do
        kubernetes.mount_pvc(task, pvc_name=self.volume, mount_path=VOLUME)
        kubernetes.empty_dir_mount(task, volume_name="tmp", mount_path="/tmp")
        kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
        kubernetes.use_config_map_as_env(task, self.settings, renamed(SETTINGS), optional=True)
        kubernetes.use_secret_as_env(task, self.secret, renamed(SECRETS), optional=True)
        kubernetes.add_pod_label(task, *CLAIM_LABEL)
        kubernetes.add_node_affinity_json(task, node_affinity_json=self.affinity)
        kubernetes.set_timeout(task, int(3600 * HOURS[task.component_spec.name]))
        if QUEUE:
            kubernetes.add_pod_label(task, QUEUE_LABEL, QUEUE)
        if asks:
            kubernetes.add_pod_label(task, TOKEN_LABEL, "true")
        else:
            task.set_retry(TRIES_AGAIN, backoff_duration=PAUSE, backoff_factor=2.0, backoff_max_duration=LONGEST)
        if trains:
            task.set_cpu_limit(self.cpu).set_memory_limit(self.memory)
            # without these a pod asks for its limits, and no node of two cores has two to give
            task.set_cpu_request(self.cpu_request).set_memory_request(self.memory_request)
            task.set_accelerator_type(self.accelerator).set_accelerator_limit(self.accelerators)
            kubernetes.add_node_selector_json(task, node_selector_json=self.node_selector)
            kubernetes.add_toleration_json(task, toleration_json=self.tolerations)
        return task
