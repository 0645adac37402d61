"""Parts of scripts/bench_control_plane.py (control_*), bench_mirror.py (mirror_*), bench_rebuild.py (rebuild_*) and
bench_tax.py (tax_*): jobs, floors, counts, figures."""
