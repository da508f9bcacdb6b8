"""`hypercomm place`: how the groups of a layout lie on a machine, and what would be better."""

from hypercomm.cli.placing.command import place_command as place_command
