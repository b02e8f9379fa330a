#!/bin/sh
# Which commit made the gate fail? `git bisect run` calls this in a second checkout; the harness of this one judges:
#   git worktree add ../bisected BAD && cd ../bisected && git bisect start BAD GOOD
#   git bisect run /path/to/this/docs/recipes/bisect.sh GOOD SWEEP.yaml [--policy FILE] [--only CELL]
# RUN="--repeat 8 --interleave" for times; counts, bytes, memory and losses need one run of each commit.
commit=$(git rev-parse HEAD) good=$1 sweep=$2
shift 2
cd "$(dirname "$0")/../.." || exit 255
arms="--arm base=$good --arm head=$commit"
# shellcheck disable=SC2086
.venv/bin/mfsdp-bench run "$sweep" $arms ${RUN:---repeat 1}
# shellcheck disable=SC2086
.venv/bin/mfsdp-bench gate "$sweep" $arms --strict "$@"
case $? in
  0) exit 0 ;;          # good: nothing required is worse
  1) exit 1 ;;          # bad
  3 | 4 | 5) exit 125 ;; # not measured, undecided or not comparable: git takes a neighbour
  *) exit 255 ;;        # wrong usage or an interrupt: git stops
esac
