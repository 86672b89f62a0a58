#!/bin/sh
# As much of enroot as a pull needs, where none is installed: a real image of a real registry, made with Debian's tools.
set -eu
tls=--tls-verify=false
case $1 in
version) echo 4.1.2 ;;
digest) skopeo inspect $tls --format '{{.Digest}}' "$(echo "$2" | tr '#' /)" ;;
import)
    output=$3 source=$(echo "$4" | tr '#' /)
    work=$(mktemp -d "${ENROOT_TEMP_PATH:-/tmp}/enroot.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    skopeo --insecure-policy copy --quiet --src-tls-verify=false "$source" "oci:$work/layout:image" >&2
    umoci raw unpack --image "$work/layout:image" "$work/rootfs" >&2
    # What pyxis, and our own front of it, reads the image's variables from.
    skopeo inspect --config --format '{{range .Config.Env}}{{println .}}{{end}}' "oci:$work/layout:image" |
        sed '/^$/d' > "$work/rootfs/etc/environment"
    mksquashfs "$work/rootfs" "$output" -noappend -all-root -no-progress $ENROOT_SQUASH_OPTIONS -wildcards -e 'dev/*' >&2
    ;;
*) echo "this front does not know $1" >&2; exit 1 ;;
esac
