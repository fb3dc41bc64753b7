"""Writes ``docker-compose.yml``: a world, its regions, and their devices.

    python -m deploy.compose > docker-compose.yml
    python -m deploy.compose --regions UK FR --devices 3 > docker-compose.yml

The first two regions always start, the others with ``--profile eight``. Who reaches whom is in the
networks alone:

=================  ==========================================================
``inner-<link>``   SuperLink, its SuperExec, its proxy, and who submits
``fleet-<link>``   the proxy and its SuperNodes, nobody else
``bridge-<r>``     a region's SuperExec (the coordinator is in it) and its uplink
=================  ==========================================================

None of them leads out of the machine.
"""

import argparse
import sys
from collections.abc import Sequence

from deploy.keys import WORLD, service_name, service_names
from regionfed.errors import ConfigurationError

REGIONS = ("US", "UK", "IN", "AU", "MX", "JP", "DE", "BR")
ALWAYS = 2  # regions without a profile
PROFILE = "eight"

HEAD = """\
# Written by `python -m deploy.compose`; change that, or give it other regions. docs/deployment.md.
name: regionfed

x-part: &part
  image: regionfed:${{REGIONFED_VERSION:-0.1.0}}
  user: "10001:10001"
  init: true
  read_only: true
  restart: always
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  pids_limit: 512
  mem_limit: ${{PART_MEMORY:-2g}}
  cpus: ${{PART_CPUS:-2}}
  tmpfs: ["/tmp:mode=1777,size=1g"]
  logging: &logging
    driver: local
    options: {{max-size: 10m, max-file: "3"}}

x-once: &once
  <<: *part
  restart: on-failure

# Often until it is well for the first time, then seldom: a check starts a Python.
x-often: &often
  interval: 60s
  timeout: 20s
  retries: 3
  start_period: 300s
  start_interval: 5s

x-proxy: &proxy
  image: ${{PROXY_IMAGE:-nginxinc/nginx-unprivileged:1.27.3-alpine}}
  user: "10001:10001"
  read_only: true
  restart: always
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  pids_limit: 64
  mem_limit: 128m
  cpus: 1
  tmpfs: ["/cache:uid=10001,gid=10001,mode=0700,size=256m"]
  command: [nginx, -c, /proxy.conf, -g, "daemon off;"]
  logging: *logging
  healthcheck:
    test: [CMD, wget, -q, -O, /dev/null, "http://127.0.0.1:8080/healthy"]
    <<: *often

x-grpc-health: &grpc-health
  test: [CMD, python, -m, deploy.healthy, "grpc://127.0.0.1:9999"]
  <<: *often

services:
  keys:
    <<: *once
    build:
      context: .
      dockerfile: deploy/Dockerfile
    network_mode: none
    command:
      [python, -m, deploy.keys, /keys, --devices, "{devices}", --regions, {regions}]
    volumes: [{{type: volume, source: keys, target: /keys}}]

  submit:
    <<: *once
    restart: "no"
    profiles: [submit]
    command: [python, -m, deploy.submit, run, deploy/world, /settings.toml]
    environment: {{SUPERLINK: "superlink-world:8000", AUTHORITY: /keys/ca.crt}}
    networks: [inner-world]
    depends_on: {{superlink-world: {{condition: service_healthy}}}}
    volumes:
      - {key_world_operator}
      - {settings}
"""

LINK = """
  superlink-{name}:
    <<: *part{profiles}
    command:
      [flower-superlink, --host, 0.0.0.0, --port, "8000", --database, /state/superlink.db,
       --ssl-ca-certfile, /keys/ca.crt, --ssl-certfile, /keys/tls.crt, --ssl-keyfile, /keys/tls.key,
       --enable-supernode-auth, --isolation, process,
       --superexec-auth-secret-file, /keys/superexec.secret,
       --disable-runtime-dependency-installation]
    networks: {{inner-{name}: {{aliases: [superlink]}}}}
    depends_on: {{keys: {{condition: service_completed_successfully}}}}
    volumes:
      - {key_superlink}
      - {{type: volume, source: superlink-{name}, target: /state}}
    healthcheck:
      test: [CMD, python, -m, deploy.healthy, "https://localhost:8000/health", --ca, /keys/ca.crt]
      <<: *often

  superexec-{name}:
    <<: *part{profiles}
    mem_limit: ${{APP_MEMORY:-8g}}
    command:
      [flower-superexec, --runtime-api-address, "superlink-{name}:8000",
       --root-certificates, /keys/ca.crt, --superexec-auth-secret-file, /keys/superexec.secret,
       --health-server-address, "127.0.0.1:9999"]
    environment: {{{site}}}
    networks: {exec_networks}
    depends_on: {{superlink-{name}: {{condition: service_healthy}}}}
    volumes:
      - {key_superlink}{exec_volumes}
    healthcheck: *grpc-health

  proxy-{name}:
    <<: *proxy{profiles}
    networks: [inner-{name}, fleet-{name}]
    depends_on: {{superlink-{name}: {{condition: service_healthy}}}}
    volumes:
      - {key_proxy}
      - {{type: bind, source: ./deploy/proxy.conf, target: /proxy.conf, read_only: true}}

  enrol-{name}:
    <<: *once{profiles}
    command: [python, -m, deploy.submit, enrol, {public_keys}]
    environment: {{SUPERLINK: "superlink-{name}:8000", AUTHORITY: /keys/ca.crt}}
    networks: [inner-{name}]
    depends_on: {{superlink-{name}: {{condition: service_healthy}}}}
    volumes: [{key_operator}]
"""

REGION = """
  coordinator-{name}:
    <<: *once{profiles}
    command: [python, -m, deploy.submit, keep, deploy/region, /settings.toml]
    environment: {{SUPERLINK: "superlink-{name}:8000", AUTHORITY: /keys/ca.crt}}
    networks: [inner-{name}]
    depends_on: {{superexec-{name}: {{condition: service_healthy}}}}
    volumes:
      - {key_operator}
      - {settings}

  uplink-{name}:
    <<: *part{profiles}
    command:
      [flower-supernode, --superlink, "proxy-world:8443", --root-certificates, /keys/ca.crt,
       --auth-supernode-private-key, /keys/key, --health-server-address, "127.0.0.1:9999",
       --node-config,
       'bridge="coordinator-{name}:9095" bridge-token="/bridge/bridge.token" bridge-tls="/bridge"']
    environment: {{FLWR_SUPEREXEC_TASK_POLL_INTERVAL: "0.5"}}
    networks: [fleet-world, bridge-{name}]
    depends_on:
      proxy-world: {{condition: service_healthy}}
      enrol-world: {{condition: service_completed_successfully}}
    volumes:
      - {key_uplink_node}
      - {key_uplink_bridge}
    healthcheck: *grpc-health
"""

DEVICE = """
  device-{name}-{index}:
    <<: *part{profiles}
    command:
      [flower-supernode, --superlink, "proxy-{name}:8443", --root-certificates, /keys/ca.crt,
       --auth-supernode-private-key, /keys/key, --health-server-address, "127.0.0.1:9999",
       --node-config, 'region="{region}" partition-id={index} state-folder="/device"']
    environment: {{FLWR_SUPEREXEC_TASK_POLL_INTERVAL: "0.5"}}
    networks: [fleet-{name}]
    depends_on:
      proxy-{name}: {{condition: service_healthy}}
      enrol-{name}: {{condition: service_completed_successfully}}
    volumes:
      - {key_device}
      - {{type: volume, source: device-{name}-{index}, target: /device}}
    healthcheck: *grpc-health
"""

SETTINGS = (
    '{type: bind, source: "${SETTINGS:-./deploy/settings.toml}", target: /settings.toml, '
    "read_only: true}"
)


def compose(regions: Sequence[str], devices: int, always: int = ALWAYS) -> str:
    """Return the Compose file of a world with these regions."""
    out = HEAD.format(
        regions=", ".join(f'"{region}"' for region in regions),
        devices=devices,
        key_world_operator=_key(f"{WORLD}/operator", "/keys"),
        settings=SETTINGS,
    )
    out += _link(WORLD, [f"/keys/{region}.pub" for region in regions], "")
    networks = [f"inner-{WORLD}", f"fleet-{WORLD}"]
    volumes = ["keys", "runs", f"superlink-{WORLD}"]
    for number, (region, name) in enumerate(service_names(regions).items()):
        profiles = f"\n    profiles: [{PROFILE}]" if number >= always else ""
        out += _link(region, [f"/keys/device-{i}.pub" for i in range(devices)], profiles)
        out += REGION.format(
            name=name,
            profiles=profiles,
            key_operator=_key(f"{region}/operator", "/keys"),
            key_uplink_node=_key(f"{WORLD}/nodes/{region}", "/keys"),
            key_uplink_bridge=_key(f"{region}/uplink", "/bridge"),
            settings=SETTINGS,
        )
        for index in range(devices):
            out += DEVICE.format(
                name=name,
                region=region,
                index=index,
                profiles=profiles,
                key_device=_key(f"{region}/nodes/device-{index}", "/keys"),
            )
        networks += [f"inner-{name}", f"fleet-{name}", f"bridge-{name}"]
        volumes += [f"superlink-{name}", f"region-{name}"]
        volumes += [f"device-{name}-{index}" for index in range(devices)]
    out += "\nnetworks:\n" + "".join(f"  {name}: {{internal: true}}\n" for name in networks)
    return out + "\nvolumes:\n" + "".join(f"  {name}: {{}}\n" for name in volumes)


def _link(link: str, public_keys: Sequence[str], profiles: str) -> str:
    name = service_name(link)
    if link == WORLD:
        networks, site = f"[inner-{name}]", "REGIONFED_LOG_FILE: /runs/log.jsonl"
        volumes = "\n      - {type: volume, source: runs, target: /runs}"
    else:
        networks = f"{{inner-{name}: {{}}, bridge-{name}: {{aliases: [coordinator-{name}]}}}}"
        site = "REGIONFED_REGION: /bridge/site.toml, REGIONFED_LOG_FILE: /region/log.jsonl"
        volumes = (
            f"\n      - {_key(f'{link}/coordinator', '/bridge')}"
            f"\n      - {{type: volume, source: region-{name}, target: /region}}"
        )
    return LINK.format(
        name=name,
        profiles=profiles,
        site=site,
        exec_networks=networks,
        exec_volumes=volumes,
        public_keys=", ".join(public_keys),
        key_superlink=_key(f"{link}/superlink", "/keys"),
        key_proxy=_key(f"{link}/proxy", "/keys"),
        key_operator=_key(f"{link}/operator", "/keys"),
    )


def _key(folder: str, target: str) -> str:
    """Mount one party's folder of the keys, and nothing else of them."""
    return (
        f"{{type: volume, source: keys, target: {target}, read_only: true, "
        f"volume: {{subpath: {folder}}}}}"
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--regions", nargs="+", default=list(REGIONS))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--always", type=int, default=ALWAYS, help="regions without a profile")
    given = parser.parse_args()
    try:
        sys.stdout.write(compose(given.regions, given.devices, given.always))
    except ConfigurationError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
