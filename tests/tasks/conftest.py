"""What tests of tasks share."""

from tests.flows.conftest import flows_here as flows_here
