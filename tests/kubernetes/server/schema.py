"""What an object must look like: the built-in kinds by Kubernetes' own schemas, those of CRDs by
theirs, with defaults, unknown fields and CEL rules; and what no schema says of pods."""

from __future__ import annotations

import copy
import datetime
import functools
import json
import re
from typing import Any

import cel
import jsonschema
from kubernetes_validate import utils as published

from tests.kubernetes.server.kinds import CRDS, Kind, Obj
from tests.kubernetes.server.store import Refusal

VERSION = "1.37"
DNS = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = re.compile(rf"{DNS}(\.{DNS})*")
LABEL = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
EMBEDDED = frozenset({"apiVersion", "kind", "metadata"})
FORMATS = jsonschema.FormatChecker([])


@FORMATS.checks("date-time", ValueError)
def _is_a_time(value: object) -> bool:
    return not isinstance(value, str) or bool(datetime.datetime.fromisoformat(value))


HANDS_ON = {"type": "object", "additionalProperties": True}


@functools.cache
def _definitions() -> Obj:
    folder = f"kubernetes-json-schema/v{VERSION}.0-local-strict"
    found: Obj = published.schema_contents(f"{folder}/_definitions.json", VERSION)["$defs"]
    return found


@functools.cache
def built_in(group: str, version: str, kind: str) -> Obj:
    """The schema of a built-in kind."""
    wanted = {"group": group, "version": version, "kind": kind}
    for one in _definitions().values():
        if wanted in one.get("x-kubernetes-group-version-kind", ()):
            found: Obj = one
            return found
    raise KeyError(wanted)


def resolve(schema: Obj) -> Obj:
    while "$ref" in schema:
        schema = _definitions()[schema["$ref"].rsplit("/", 1)[1]]
    return schema


def schema_of(kind: Kind) -> Obj:
    if kind.schema is None:
        return built_in(kind.group, kind.version, kind.name)
    meta = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    text = {"type": "string"}
    own = {**kind.schema.get("properties", {}), "apiVersion": text, "kind": text, "metadata": meta}
    return {**kind.schema, "properties": own}


def without_unknown(value: Any, schema: Obj, path: str, found: list[str], *, crd: bool) -> Any:
    """A copy without fields that the schema has not; their paths go to `found`."""
    crd = crd and "$ref" not in schema
    schema = resolve(schema)
    if isinstance(value, list):
        below = schema.get("items")
        if below is None:
            return value
        return [
            without_unknown(one, below, f"{path}[{i}]", found, crd=crd)
            for i, one in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    known, other = schema.get("properties", {}), schema.get("additionalProperties")
    free = schema.get("x-kubernetes-preserve-unknown-fields") or other is True
    free = free or (not crd and not known and not isinstance(other, dict))
    kept = {}
    for name, one in value.items():
        here = f"{path}.{name}" if path else name
        below = known.get(name) or (other if isinstance(other, dict) else None)
        if below is None and schema.get("x-kubernetes-embedded-resource") and name in EMBEDDED:
            below = HANDS_ON
        if below is not None:
            kept[name] = without_unknown(one, below, here, found, crd=crd)
        elif free:
            kept[name] = one
        else:
            found.append(here)
    return kept


def fill(value: Any, schema: Obj) -> Any:
    """Put a CRD's defaults where nothing is; nulls go where none may be."""
    if isinstance(value, list) and "items" in schema:
        return [fill(one, schema["items"]) for one in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {})
    for name, below in known.items():
        if value.get(name, 0) is None and not below.get("nullable"):
            del value[name]
        if name not in value and "default" in below:
            value[name] = copy.deepcopy(below["default"])
        if name in value:
            value[name] = fill(value[name], below)
    if isinstance(other := schema.get("additionalProperties"), dict):
        for name in value.keys() - known.keys():
            value[name] = fill(value[name], other)
    return value


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _as_json_schema(schema: Any) -> Any:
    """Of an openAPIV3Schema, for jsonschema's draft 4 (where exclusiveMinimum is a boolean)."""
    if isinstance(schema, list):
        return [_as_json_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _as_json_schema(one) for name, one in schema.items() if name != "default"}
    if isinstance(schema.get("properties"), dict):  # a field may be called `default`
        made["properties"] = {n: _as_json_schema(s) for n, s in schema["properties"].items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") is True and "type" in schema:
        made["type"] = [schema["type"], "null"]
    return made


@functools.cache
def _checker(text: str, *, crd: bool) -> Any:
    schema = json.loads(text)
    if crd:
        return jsonschema.Draft4Validator(_as_json_schema(schema), format_checker=FORMATS)
    return jsonschema.Draft202012Validator({**schema, "$defs": _definitions()})


def _where(path: Any) -> str:
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path).lstrip(".")


def _sentence(error: jsonschema.ValidationError) -> tuple[str, str, str]:
    """Field, reason and message as an API server words them."""
    field, value = _where(error.absolute_path), json.dumps(error.instance)
    if isinstance(error.instance, (dict, list)):
        value = '"object"' if isinstance(error.instance, dict) else '"array"'
    kind, limit = error.validator, error.validator_value
    if kind == "required":
        missing = next(one for one in limit if one not in error.instance)
        return f"{field}.{missing}".lstrip("."), "FieldValueRequired", "Required value"
    if kind == "enum":
        known = ", ".join(json.dumps(one) for one in limit)
        return (
            field,
            "FieldValueNotSupported",
            f"Unsupported value: {value}: supported values: {known}",
        )
    words = {
        "type": f"must be of type {limit}: {value}",
        "minimum": f"should be greater than or equal to {limit}",
        "maximum": f"should be less than or equal to {limit}",
        "minItems": f"should have at least {limit} items",
        "pattern": f"should match '{limit}'",
        "maxLength": f"should be at most {limit} chars long",
    }
    said = words.get(str(kind), f"does not fit {kind} {limit}")
    return field, "FieldValueInvalid", f"Invalid value: {value}: {field} in body {said}"


def _invalid(kind: Kind, name: str, causes: list[tuple[str, str, str]]) -> Refusal:
    told = [f"{field or '<nil>'}: {message}" for field, _, message in causes]
    text = told[0] if len(told) == 1 else f"[{', '.join(told)}]"
    full = f"{kind.name}.{kind.group}" if kind.group else kind.name
    details = {
        "name": name, "group": kind.group, "kind": kind.name,
        "causes": [{"field": f, "reason": r, "message": m} for f, r, m in causes],
    }  # fmt: skip
    return Refusal(422, "Invalid", f'{full} "{name}" is invalid: {text}', details=details)


def validate(kind: Kind, obj: Obj, old: Obj | None) -> None:
    """Refusal where an API server would refuse it."""
    name = obj["metadata"]["name"]
    schema = schema_of(kind)
    body = {n: v for n, v in obj.items() if n != "metadata"} if kind.schema else obj
    if kind.schema is not None:
        schema = {**kind.schema, "required": kind.schema.get("required", [])}
        if not schema["required"]:
            del schema["required"]
    checker = _checker(json.dumps(schema), crd=kind.schema is not None)
    errors = sorted(checker.iter_errors(body), key=lambda error: list(map(str, error.path)))
    if errors and kind.schema is None and (wrong := [e for e in errors if e.validator == "type"]):
        message = (
            f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: json: '
            f"cannot unmarshal {json.dumps(wrong[0].instance)[:60]} into Go struct field "
            f"{_where(wrong[0].absolute_path)} of type {wrong[0].validator_value[0]}"
        )
        raise Refusal(400, "BadRequest", message)
    causes = [_sentence(error) for error in errors]
    if not causes and kind.schema is not None:
        whole = {**body, "metadata": {"name": obj["metadata"].get("name", "")}}
        causes = _rules(kind.schema, whole, None if old is None else old, "")
    if not causes:
        causes = _own_rules(kind, obj, old)
    if causes:
        raise _invalid(kind, name, causes)


def _rules(schema: Obj, value: Any, old: Any, path: str) -> list[tuple[str, str, str]]:
    """What the CEL rules say that do not hold, from the outside in."""
    causes = []
    for one in schema.get("x-kubernetes-validations", ()):
        rule = one["rule"]
        if "oldSelf" in rule and old is None:
            continue
        try:
            holds = _program(rule).execute({"self": value, "oldSelf": old})
            said = one.get("message") or f"failed rule: {rule}"
        except Exception as error:
            holds, said = False, f"rule evaluation error: {rule}: {error}"
        if holds is not True:
            shown = '"object"' if isinstance(value, dict) else json.dumps(value)
            where = path + one.get("fieldPath", "")
            reason = one.get("reason", "FieldValueInvalid")
            causes.append((where.lstrip("."), reason, f"Invalid value: {shown}: {said}"))
    if isinstance(value, dict):
        was = old if isinstance(old, dict) else {}
        for name, below in schema.get("properties", {}).items():
            if name in value:
                causes += _rules(below, value[name], was.get(name), f"{path}.{name}")
        if isinstance(other := schema.get("additionalProperties"), dict):
            for name in value:
                causes += _rules(other, value[name], was.get(name), f"{path}[{name}]")
    if isinstance(value, list) and "items" in schema:
        for i, one in enumerate(value):
            causes += _rules(schema["items"], one, None, f"{path}[{i}]")
    return causes


@functools.cache
def _program(rule: str) -> Any:
    return cel.compile(rule)


def _own_rules(kind: Kind, obj: Obj, old: Obj | None) -> list[tuple[str, str, str]]:
    """What no schema says."""
    causes = []
    if kind.plural not in ("roles", "rolebindings", "clusterroles", "clusterrolebindings"):
        name = obj["metadata"]["name"]
        form = re.compile(DNS) if kind.plural in ("services", "namespaces") else SUBDOMAIN
        most = 63 if kind.plural in ("services", "namespaces") else 253
        if not form.fullmatch(name) or len(name) > most:
            said = "a lowercase RFC 1123 subdomain has lower case letters, digits, '-' and '.'"
            causes.append(_bad("metadata.name", name, said))
    for label, text in (obj["metadata"].get("labels") or {}).items():
        if len(text) > 63 or (text and not LABEL.fullmatch(text)):
            causes.append(_bad(f"metadata.labels[{label}]", text, "a valid label must be ..."))
    if kind.key == ("", "pods"):
        causes += _pod(obj["spec"], "spec")
        if old is not None and _fixed(old) != _fixed(obj):
            said = (
                "Forbidden: pod updates may not change fields other than `spec.containers[*].image`"
            )
            causes.append(("spec", "FieldValueForbidden", said))
    if kind.key == ("batch", "jobs"):
        causes += _job(obj, old)
    if kind.key == ("apps", "deployments"):
        causes += _pod(obj["spec"]["template"].get("spec") or {}, "spec.template.spec")
    if kind.key == CRDS:
        causes += _crd(obj)
    return causes


def _bad(field: str, value: Any, said: str) -> tuple[str, str, str]:
    return field, "FieldValueInvalid", f"Invalid value: {json.dumps(value)}: {said}"


def _required(field: str) -> tuple[str, str, str]:
    return field, "FieldValueRequired", "Required value"


def _fixed(pod: Obj) -> Obj:
    """What of a pod's spec no update may change."""
    free = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "nodeName")
    spec = {name: value for name, value in pod["spec"].items() if name not in free}
    spec["containers"] = [{**one, "image": ""} for one in spec["containers"]]
    return spec


def _pod(spec: Obj, path: str) -> list[tuple[str, str, str]]:
    causes = []
    if not spec.get("containers"):
        causes.append(_required(f"{path}.containers"))
    volumes = [one["name"] for one in spec.get("volumes") or ()]
    for i, name in enumerate(volumes):
        if name in volumes[:i]:
            causes.append(_bad(f"{path}.volumes[{i}].name", name, "Duplicate value"))
    seen: set[str] = set()
    for part in ("initContainers", "containers"):
        for i, one in enumerate(spec.get(part) or ()):
            here = f"{path}.{part}[{i}]"
            if not re.fullmatch(DNS, one["name"]) or len(one["name"]) > 63:
                causes.append(_bad(f"{here}.name", one["name"], "a lowercase RFC 1123 label"))
            if one["name"] in seen:
                causes.append(
                    (f"{here}.name", "FieldValueDuplicate", f'Duplicate value: "{one["name"]}"')
                )
            seen.add(one["name"])
            if not one.get("image"):
                causes.append(_required(f"{here}.image"))
            for j, mount in enumerate(one.get("volumeMounts") or ()):
                if mount["name"] not in volumes:
                    said = f'Not found: "{mount["name"]}"'
                    causes.append((f"{here}.volumeMounts[{j}].name", "FieldValueNotFound", said))
    if spec.get("restartPolicy", "Always") not in ("Always", "OnFailure", "Never"):
        known = 'supported values: "Always", "OnFailure", "Never"'
        said = f'Unsupported value: "{spec["restartPolicy"]}": {known}'
        causes.append((f"{path}.restartPolicy", "FieldValueNotSupported", said))
    for name in ("hostname", "subdomain"):
        if (text := spec.get(name)) and (not re.fullmatch(DNS, text) or len(text) > 63):
            causes.append(_bad(f"{path}.{name}", text, "a lowercase RFC 1123 label"))
    if spec.get("terminationGracePeriodSeconds", 0) < 0:
        causes.append(_bad(f"{path}.terminationGracePeriodSeconds", -1, "must be >= 0"))
    return causes


def _job(job: Obj, old: Obj | None) -> list[tuple[str, str, str]]:
    spec = job["spec"]
    pod = spec["template"].get("spec") or {}
    causes = _pod(pod, "spec.template.spec")
    if pod.get("restartPolicy") not in ("OnFailure", "Never"):
        causes.append(("spec.template.spec.restartPolicy", "FieldValueRequired",
                       'Required value: valid values: "OnFailure", "Never"'))  # fmt: skip
    if spec.get("completionMode") == "Indexed" and "completions" not in spec:
        causes.append(_required("spec.completions"))
    if old is not None:
        was = old["spec"]
        if spec["template"] != was["template"] and not was.get("suspend"):
            causes.append(_bad("spec.template", "...", "field is immutable"))
        resized = spec.get("completions") != was.get("completions")
        if resized and spec.get("completions") != spec.get("parallelism"):
            causes.append(_bad("spec.completions", spec.get("completions"), "field is immutable"))
    return causes


def _crd(crd: Obj) -> list[tuple[str, str, str]]:
    spec = crd["spec"]
    causes = []
    wanted = f"{spec['names']['plural']}.{spec['group']}"
    if crd["metadata"]["name"] != wanted:
        said = f'must be spec.names.plural+"."+spec.group, that is {wanted}'
        causes.append(_bad("metadata.name", crd["metadata"]["name"], said))
    if sum(one["storage"] for one in spec["versions"]) != 1:
        causes.append(
            _bad("spec.versions", "...", "must have exactly one version marked as storage")
        )
    for i, one in enumerate(spec["versions"]):
        here = f"spec.versions[{i}].schema.openAPIV3Schema"
        schema = one.get("schema", {}).get("openAPIV3Schema")
        if schema is None:
            causes.append(_required(here))
        else:
            causes += _structural(schema, here)
    return causes


def _structural(schema: Obj, path: str) -> list[tuple[str, str, str]]:
    """What of a schema an API server refuses."""
    causes = []
    free = ("type", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")
    if schema.keys().isdisjoint(free):
        causes.append(_required(f"{path}.type"))
    if "properties" in schema and "additionalProperties" in schema:
        said = "Forbidden: additionalProperties and properties are mutual exclusive"
        causes.append((f"{path}.additionalProperties", "FieldValueForbidden", said))
    if "default" in schema:
        filled = fill(copy.deepcopy(schema["default"]), schema)
        for error in _checker(json.dumps(schema), crd=True).iter_errors(filled):
            causes.append(_bad(f"{path}.default", schema["default"], _sentence(error)[2]))
    if schema.get("x-kubernetes-list-type") == "map" and not schema.get(
        "x-kubernetes-list-map-keys"
    ):
        causes.append(_required(f"{path}.x-kubernetes-list-map-keys"))
    for i, one in enumerate(schema.get("x-kubernetes-validations", ())):
        try:
            _program(one["rule"])
        except Exception as error:
            said = f"compilation failed: {error}"
            causes.append(_bad(f"{path}.x-kubernetes-validations[{i}].rule", one["rule"], said))
    for name, below in schema.get("properties", {}).items():
        causes += _structural(below, f"{path}.properties[{name}]")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            causes += _structural(schema[name], f"{path}.{name}")
    return causes
