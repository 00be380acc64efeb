"""Make elasticrun/wire/pb/ from protos/. Needs grpcio-tools and mypy-protobuf (extra `dev`).

    python scripts/gen_proto.py            write the files
    python scripts/gen_proto.py --check    exit 1 and name the files that are stale

protoc writes the descriptor and the type stubs; the module that wraps the descriptor is made here,
and uses only protobuf's public functions. protoc's own Python code and gRPC stubs reject every
runtime older than the protoc that made them, but a launcher must not dictate its users' protobuf
version. No service needs a stub: methods are named in `wire/rpc/channel.py` and `wire/rpc/etcd.py`.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "elasticrun" / "wire" / "pb"

PACKAGE = '"""Generated from protos/ by scripts/gen_proto.py; for `wire/rpc`."""\n'

MODULE = '''"""Generated from {source} by scripts/gen_proto.py; do not edit."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FILE = (
{blob}
)

# A pool of our own: another library's messages of the same name cannot clash with these.
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(descriptor_pb2.FileDescriptorProto.FromString(_FILE))


def _message(name):
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName("{package}." + name))


{classes}
'''


def run_protoc(*arguments: str) -> None:
    """Run protoc in this process. Exits the script if protoc fails."""
    # Imported here so that --help works in an environment without the development tools.
    from grpc_tools import protoc

    if code := protoc.main(["protoc", f"--proto_path={PROTOS}", *arguments]):
        raise SystemExit(f"protoc ended with {code}")


def module_text(source: Path, scratch: Path) -> str:
    """The Python module for one proto file: its descriptor and one class per message."""
    from google.protobuf import descriptor_pb2

    described = scratch / "descriptor.bin"
    run_protoc(f"--descriptor_set_out={described}", str(source))
    file = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file[0]
    raw = file.SerializeToString(deterministic=True)
    blob = "\n".join(f"    {raw[at : at + 24]!r}" for at in range(0, len(raw), 24))
    classes = "\n".join(f'{m.name} = _message("{m.name}")' for m in file.message_type)
    return MODULE.format(
        source=source.relative_to(ROOT), blob=blob, package=file.package, classes=classes
    )


def generate() -> dict[str, str]:
    """All files of the package: text by file name."""
    made = {"__init__.py": PACKAGE}
    plugin = Path(sysconfig.get_path("scripts")) / "protoc-gen-mypy"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for source in sorted(PROTOS.rglob("*.proto")):
            made[f"{source.stem}_pb2.py"] = module_text(source, scratch)
            run_protoc(
                f"--plugin=protoc-gen-mypy={plugin}", f"--mypy_out=quiet:{scratch}", str(source)
            )
        for stub in scratch.rglob("*_pb2.pyi"):
            made[stub.name] = stub.read_text()
    return made


def main() -> int:
    """Write the package, or with --check compare its code with the existing files. Returns 1 if
    code is stale.

    --check ignores the stubs, whose text depends on the version of mypy-protobuf.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether files are stale")
    check = parser.parse_args().check
    made = generate()
    there = {path.name: path.read_text() for path in TARGET.glob("*_pb2.py*")}
    there |= {path.name: path.read_text() for path in TARGET.glob("__init__.py")}
    stale = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))
    if check:
        stale = [name for name in stale if name.endswith(".py")]
        for name in stale:
            print(f"stale: {(TARGET / name).relative_to(ROOT)}; run scripts/gen_proto.py")
        return 1 if stale else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in made:
            (TARGET / name).write_text(made[name])
        else:
            (TARGET / name).unlink()
        print(f"wrote {(TARGET / name).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
