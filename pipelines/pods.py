"""What the pods of all pipelines have in common; everything that differs between clusters is a parameter."""

from dataclasses import dataclass

from kfp import dsl, kubernetes

VOLUME = "/realmops"
RUNS = f"{VOLUME}/runs"
USER = 10001  # of the image
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN")
SETTINGS = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "HF_HUB_OFFLINE")


@dataclass(frozen=True)
class Pods:
    """How the pods of one pipeline are placed; the fields are parameters of the pipeline, by the same names."""

    image: str
    volume: str
    settings: str
    secret: str
    cpu: str
    memory: str
    accelerator: str
    accelerators: str
    node_selector: dict
    tolerations: list

    @property
    def limits(self) -> str:
        """An input for a task: KFP hands a group of tasks only what one of them takes as an input, limits are none."""
        return f"cpu {self.cpu}, memory {self.memory}, {self.accelerators} {self.accelerator}"

    def placed(self, task: dsl.PipelineTask, *, trains: bool = False) -> dsl.PipelineTask:
        """Give a task image, volume and settings; one that trains also limits, accelerator and nodes."""
        task.set_container_image(self.image)
        task.set_caching_options(False)  # a stage knows itself whether there is anything to do
        kubernetes.mount_pvc(task, pvc_name=self.volume, mount_path=VOLUME)
        kubernetes.empty_dir_mount(task, volume_name="tmp", mount_path="/tmp")
        kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
        kubernetes.use_config_map_as_env(task, self.settings, {name: name for name in SETTINGS}, optional=True)
        kubernetes.use_secret_as_env(task, self.secret, {name: name for name in SECRETS}, optional=True)
        if trains:
            task.set_cpu_limit(self.cpu).set_memory_limit(self.memory)
            task.set_accelerator_type(self.accelerator).set_accelerator_limit(self.accelerators)
            kubernetes.add_node_selector_json(task, node_selector_json=self.node_selector)
            kubernetes.add_toleration_json(task, toleration_json=self.tolerations)
        return task
