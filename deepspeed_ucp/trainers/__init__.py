"""What runs in the place of the trainers' own methods, so that the job around an engine comes back as exactly as the
engine itself: one module per trainer, which is imported when that trainer calls it (:mod:`deepspeed_ucp.attach`)."""
