"""What runs on the developer's machine: build, sign, publish, provision, deploy."""
