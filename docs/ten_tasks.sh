#!/bin/sh
# The ten tasks of a second week, as a person on duty does them: on the nights of `nightbridge demo`, with the commands of
# --help alone. Prints how long each took. Usage: docs/ten_tasks.sh [FOLDER OF THE DEMO, default .nightbridge]
set -eu

demo=${1:-.nightbridge}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export NIGHTBRIDGE_SITE="$demo/demo/site.toml"
test -f "$NIGHTBRIDGE_SITE" || nightbridge demo --workspace "$demo"
# The newest night that ended so; the demo has a slow one and none that failed.
nights=$(nightbridge nights 2>/dev/null)
night() { echo "$nights" | awk -v end="$1" '$0 ~ end { print $1; exit }'; }
slow=$(night regressed)
failed=$(night failed)

begun=$(date +%s)
task() {
    now=$(date +%s)
    echo "== ${done_task:-start}: $((now - begun)) s"
    begun=$now
    done_task=$1
}

# A command whose answer is an exit code other than 0.
answers() {
    code=$1
    shift
    found=0
    "$@" || found=$?
    test "$found" = "$code"
}

task "1 which test got slower, since when, by which commit, how sure"
nightbridge history | grep "llama-small"
answers 1 nightbridge compare "llama-small@$slow" | grep "suspect .*only commit.*next: nightbridge bisect llama-small"
nightbridge history llama-small

task "2 a test of my own"
nightbridge init llama3_8b --gpus 16 --out "$work" </dev/null
nightbridge validate "$work/llama3_8b.toml" --system "$work/site.toml"
nightbridge explain cmd_args.mb

task "3 my site"
answers 4 nightbridge doctor --system "$work/site.toml" | grep -E "needs? you"
nightbridge doctor

task "4 accept a regression, and take it back"
nightbridge accept "llama-small@$slow" --why "known, repaired next week" --until "$slow"
nightbridge accept --list
nightbridge accept --undo "llama-small@$slow" --why "by mistake" | grep "judged again"

task "5 the culprit commit"
nightbridge bisect llama-small --yes | grep "Synchronise after every gradient bucket"

task "6 compare two runs, check one, and get it back"
answers 1 nightbridge compare "llama-small@$slow" llama-small@last-good 2>&1 | grep "against llama-small"
nightbridge verify llama-small@last-good
nightbridge fetch llama-small@last-good "$work/run"
test -f "$work/run/manifest.json" && test ! -e "$work/run/INCOMPLETE.txt"

task "7 why a run failed"
nightbridge logs --errors "llama-small@${failed:-last}"

task "8 what runs now, and ending it"
sed 's/^max_steps = .*/max_steps = 100000/' "$demo/demo/conf/llama_small.toml" >"$work/live.toml"
nightbridge run "$work/live.toml" --night live >"$work/live.txt" 2>&1 &
until grep "^job " "$work/live.txt" || ! kill -0 "$!"; do sleep 1; done
seen=
for _look in $(seq 20); do
    sleep 3
    # More steps than its time limit allows, and it says so.
    nightbridge status live 2>/dev/null | grep "running, job .* steps, its time limit ends it" && seen=1 && break
done
test -n "$seen"
nightbridge ls --limit 2
nightbridge cancel --night live | grep "cancelled job"
answers 3 wait "$!"
grep "cancelled. next: nightbridge run .* --night live --retry" "$work/live.txt"

task "9 in Python"
python - <<'PYTHON'
import os

from nightbridge import read_history

site = os.environ["NIGHTBRIDGE_SITE"]
rows = read_history("llama-small", system=site).to_dataframe()
print(rows[["night", "verdict", "step_time"]].to_string())
PYTHON

task "10 all tests as a table, the disk, the version"
nightbridge history --csv >"$work/tests.csv"
grep "llama-small" "$work/tests.csv"
nightbridge du
nightbridge prune
nightbridge --version

task "end"
