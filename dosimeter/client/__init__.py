"""The client's side: what happens before an update leaves."""
