"""What a rotation does and when: schedules, timelines, traces, figures, and what works on this machine."""
