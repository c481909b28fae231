"""The virtual board: Debian trixie under systemd-nspawn, with a disk, a network and an sshd of its own.

What is real here: systemd and its services, sysext and confext merges, D-Bus, polkit, journald, ssh, and a power cut
that loses what was not synced. What is not: the kernel is the host's, so there is no device-mapper, no udev and no
watchdog device, the uptime is the host's, and where the host's cgroup controllers are version 1, memory limits are
not enforced.
"""
