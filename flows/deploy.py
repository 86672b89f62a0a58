"""What a deployment needs on the Prefect server besides `prefect deploy`: the zombie automation, and a night by hand.

python -m flows.deploy automation      create or update the automation against zombie flow runs
python -m flows.deploy night [ID]      start the nightly deployment for one night, once
"""

import sys
from datetime import timedelta

from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.deployments import run_deployment
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from nightbridge.nights.ids import checked_night, new_night

AUTOMATION = "nightbridge: crash flow runs without a heartbeat"
DEPLOYMENT = "nightly-regression/nightly"
# Three heartbeats of the default 180 s (PREFECT_FLOWS_HEARTBEAT_FREQUENCY).
SILENCE = timedelta(seconds=540)


def create_zombie_automation() -> None:
    """Create or update the automation: a flow run that stops sending heartbeats becomes Crashed.

    Without it a killed flow process stays Running for ever, and under a concurrency limit of 1 no later night starts.
    The Slurm job lives on; the next run of the same night finds it.
    """
    wanted = Automation(
        name=AUTOMATION,
        description="A flow process that died says nothing. This says it.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="No heartbeat: the flow's process is gone.")],
    )
    try:
        existing = Automation.read(name=AUTOMATION)
    except ValueError:
        wanted.create()
        return
    wanted.id = existing.id
    wanted.update()


def start_night(night: str) -> str:
    """Start the nightly deployment for a night and return the flow run's id; asked twice, it is the same run."""
    flow_run = run_deployment(
        DEPLOYMENT, parameters={"night": checked_night(night)}, idempotency_key=f"night-{night}", timeout=0
    )
    return str(flow_run.id)


def main(arguments: list[str]) -> int:
    """Run one of the two commands; return the exit code."""
    match arguments:
        case ["automation"]:
            create_zombie_automation()
            print(f"automation: {AUTOMATION}")
        case ["night", *rest] if len(rest) <= 1:
            night = rest[0] if rest else new_night()
            print(f"night {night}: flow run {start_night(night)}")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
