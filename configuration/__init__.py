"""EngramConfig and the export of remote code to Hub folders."""
