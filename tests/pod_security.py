"""Kubernetes' pod security standards `baseline` and `restricted`, as its API server applies them to Linux pods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Spec = dict[str, Any]

CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem",
}  # fmt: skip
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
PROFILES = {"RuntimeDefault", "Localhost"}
HOOKS = ("livenessProbe", "readinessProbe", "startupProbe")


def containers(spec: Spec) -> list[dict[str, Any]]:
    """All of a pod's: those that start it and those added to look into it as well."""
    return [one for kind in ("initContainers", "containers", "ephemeralContainers") for one in spec.get(kind) or []]


def violations(spec: Spec, level: str) -> set[str]:
    """The names of the checks that a pod's spec fails at ``level``, baseline or restricted; empty: it is admitted."""
    assert level in ("baseline", "restricted")
    return {*_common(spec), *(_baseline(spec) if level == "baseline" else _restricted(spec))}


def _contexts(spec: Spec) -> list[dict[str, Any]]:
    return [spec.get("securityContext") or {}, *(one.get("securityContext") or {} for one in containers(spec))]


def _capabilities(spec: Spec, which: str) -> list[set[str]]:
    contexts = _contexts(spec)[1:]
    return [set((context.get("capabilities") or {}).get(which) or ()) for context in contexts]


def _common(spec: Spec) -> Iterator[str]:
    contexts = _contexts(spec)
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "host namespaces"
    if any(context.get("privileged") for context in contexts):
        yield "privileged"
    if any(port.get("hostPort") for one in containers(spec) for port in one.get("ports") or ()):
        yield "hostPort"
    if any(_type(context, "appArmorProfile") not in {None, *PROFILES} for context in contexts):
        yield "forbidden AppArmor profile"
    if any(context.get("procMount") not in (None, "Default") for context in contexts):
        yield "procMount"
    if any(_type(context, "seccompProfile") not in {None, *PROFILES} for context in contexts):
        yield "seccompProfile"
    options = [context.get("seLinuxOptions") or {} for context in contexts]
    if any(one.get("type", "") not in SELINUX_TYPES or one.get("user") or one.get("role") for one in options):
        yield "seLinuxOptions"
    if any(one["name"] not in SYSCTLS for one in contexts[0].get("sysctls") or ()):
        yield "forbidden sysctls"
    hooks = [one.get(name) or {} for one in containers(spec) for name in HOOKS]
    hooks += [hook or {} for one in containers(spec) for hook in (one.get("lifecycle") or {}).values()]
    if any((hook.get(way) or {}).get("host") for hook in hooks for way in ("httpGet", "tcpSocket")):
        yield "probe or lifecycle host"


def _baseline(spec: Spec) -> Iterator[str]:
    if any("hostPath" in volume for volume in spec.get("volumes") or ()):
        yield "hostPath volumes"
    if any(added - CAPABILITIES for added in _capabilities(spec, "add")):
        yield "non-default capabilities"


def _restricted(spec: Spec) -> Iterator[str]:
    pod, *each = _contexts(spec)
    if any(set(volume) - {"name"} - VOLUMES for volume in spec.get("volumes") or ()):
        yield "restricted volume types"
    if any(context.get("allowPrivilegeEscalation") is not False for context in each):
        yield "allowPrivilegeEscalation != false"
    non_root = pod.get("runAsNonRoot")
    if non_root is False or not all(context.get("runAsNonRoot", non_root) for context in each):
        yield "runAsNonRoot != true"
    if any(context.get("runAsUser") == 0 for context in (pod, *each)):
        yield "runAsUser=0"
    if not all(_type(context, "seccompProfile") or _type(pod, "seccompProfile") for context in each):
        yield "seccompProfile"
    dropped, added = _capabilities(spec, "drop"), _capabilities(spec, "add")
    if not all("ALL" in names for names in dropped) or any(names - {"NET_BIND_SERVICE"} for names in added):
        yield "unrestricted capabilities"


def _type(context: dict[str, Any], profile: str) -> str | None:
    found: str | None = (context.get(profile) or {}).get("type")
    return found
