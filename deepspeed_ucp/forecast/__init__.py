"""What a resume at some topology would do, on every rank, without an engine: what ``ds_ucp plan`` tells."""
