"""Parts of scripts/bench_control_plane.py (control_*) and scripts/bench_mirror.py (mirror_*): jobs, floors, figures."""
