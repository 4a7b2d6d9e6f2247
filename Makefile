# The two commands: `make run` shows Corbel at work, `make test` checks it.
.PHONY: run test prepare build fmt

run: prepare
	@scripts/run.sh

test: prepare
	@scripts/prepare.sh tools
	@scripts/test.sh

prepare:
	@scripts/prepare.sh

build: prepare
	cargo build --release -p corbel

fmt:
	cargo fmt --all
