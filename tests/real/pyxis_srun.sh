#!/bin/bash
# Stands before Slurm's srun and does for containers what pyxis does: takes its options, unpacks the image once for a
# step, mounts what is asked for in a mount namespace of each task, changes root, and goes to the working directory.
# For tests on one machine, as root. Variables: the image's own win, but for those that --container-env names (pyxis).
set -u
real=@SRUN@

fail() {
    echo "pyxis: $*" >&2
    exit 1
}

# --- inside a task -----------------------------------------------------------------------------------------------------

mount_all() {
    local root=$1 spec source target
    mount --bind "$root" "$root"
    for target in proc dev sys tmp; do mkdir -p "$root/$target"; done
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    IFS=, read -ra specs <<< "$FRONT_MOUNTS"
    for spec in ${specs[@]+"${specs[@]}"}; do
        IFS=: read -r source target _ <<< "$spec"
        target=${target:-$source}
        [ -e "$source" ] || fail "--container-mounts: source path does not exist: $source"
        if [ -d "$source" ]; then
            mkdir -p "$root$target"
        else
            mkdir -p "$(dirname "$root$target")"
            [ -e "$root$target" ] || : > "$root$target"
        fi
        mount --rbind "$source" "$root$target" || fail "--container-mounts: cannot mount $spec"
    done
}

take_environment() {
    local line name
    while IFS= read -r line || [ -n "$line" ]; do
        name=${line%%=*}
        case ",$FRONT_ENV," in
        *",$name,"*) [ -n "${!name+set}" ] || export "$line" ;;
        *) export "$line" ;;
        esac
    done < "$1/etc/environment"
}

if [ "${1-}" = --inside ]; then
    shift
    root=$FRONT_ROOTS/root
    mkdir -p "$FRONT_ROOTS"
    (
        flock 9
        if [ ! -d "$root" ]; then
            echo "pyxis: unpacking $FRONT_IMAGE" >&2
            rm -rf "$root.new"
            unsquashfs -quiet -no-progress -dest "$root.new" "$FRONT_IMAGE" > /dev/null && mv "$root.new" "$root"
        fi
    ) 9> "$FRONT_ROOTS/lock" || exit 1
    [ -d "$root" ] || fail "failed to create container filesystem from $FRONT_IMAGE"
    mount_all "$root"
    workdir=$FRONT_WORKDIR
    take_environment "$root"
    unset FRONT_IMAGE FRONT_MOUNTS FRONT_WORKDIR FRONT_ENV FRONT_ROOTS
    exec chroot "$root" /bin/sh -c 'cd "$1" || exit 1; shift; exec "$@"' sh "$workdir" "$@"
fi

# --- in the batch script -----------------------------------------------------------------------------------------------

if [ "${1-}" = --help ]; then
    "$real" --help
    echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH   (test front)"
    exit
fi

image='' mounts='' workdir=/ environment=''
passed=()
while [ $# -gt 0 ]; do
    case $1 in
    --container-image=* | --container-mounts=* | --container-workdir=* | --container-env=*)
        set -- "${1%%=*}" "${1#*=}" "${@:2}"
        continue
        ;;
    --container-image) image=$2; shift 2 ;;
    --container-mounts) mounts=$2; shift 2 ;;
    --container-workdir) workdir=$2; shift 2 ;;
    --container-env) environment=$2; shift 2 ;;
    --no-container-mount-home | --container-writable) shift ;;
    # Debian's Slurm has no pmix, which a container of ours does not need.
    --mpi=pmix) shift ;;
    --container-* | --no-container-*) fail "this front does not know $1" ;;
    --output | --error | --nodes | --ntasks | --ntasks-per-node | --chdir | --job-name | --nodelist | -[oenNwJD])
        passed+=("$1" "$2")
        shift 2
        ;;
    -*) passed+=("$1"); shift ;;
    *) break ;;
    esac
done
[ -n "$image" ] || exec "$real" ${passed[@]+"${passed[@]}"} "$@"
case $image in
/* | .*) [ -f "$image" ] || fail "no such image: $image" ;;
*) fail "this front imports nothing, and $image is no path" ;;
esac

export FRONT_IMAGE=$image FRONT_MOUNTS=$mounts FRONT_WORKDIR=$workdir FRONT_ENV=$environment
FRONT_ROOTS=$(mktemp -d "${TMPDIR:-/tmp}/nightbridge-pyxis.XXXXXX")
export FRONT_ROOTS
trap 'rm -rf --one-file-system "$FRONT_ROOTS"' EXIT
trap 'exit 143' TERM
"$real" ${passed[@]+"${passed[@]}"} unshare --mount --propagation=private "$(readlink -f "$0")" --inside "$@"
