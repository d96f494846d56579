#!/usr/bin/env bash
# Brings one kind of trouble over one node of a job, and undoes it when it ends: see docs/chaos.md.
#
# It is started before the job and waits for the node. It needs only bash, coreutils and /proc.
# `sh start_chaos.sh`, as people type it, is dash on many machines.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set +o posix
# shellcheck disable=SC2015 # Where A && B || C is written, C is meant for either.
set -u -o pipefail
export LC_ALL=C
declare when stage cpu times place left share leave most patience delay period duration limit
declare chosen_role chosen_rank meant
# shellcheck source=scripts/chaos_node.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/chaos_node.sh"

usage() {
    cat <<'END'
usage: bash start_chaos.sh VERB &     in front of the command that starts the job

  no-chaos         nothing
  kill-process     SIGKILL for one worker (CHAOS_LOCAL_RANK=0, CHAOS_TIMES=1, CHAOS_PERIOD=30 seconds);
                   with --network-check, for that process of the check, again and again until it is over, so that the node is
                   found broken
  kill-node        SIGKILL for all processes of the node at once
  stop-process     SIGSTOP for the workers of the node: a hang
  cpu-overload     every CPU is busy; a node of a local cluster runs CHAOS_CPU_LEFT=10 percent of the time instead
  memory-overload  CHAOS_MEMORY=80 percent of the free memory are taken; with CHAOS_ROLE, what the task's limit
                   leaves, so that the task is killed for memory
  network-loss     the network of the node is cut (CHAOS_INTERFACE)
  disk-full        a disk is filled (CHAOS_PATH, CHAOS_LEAVE=0 MiB)

It acts in node WORKER_ID (1) of a local cluster, and in a container only where WORKER_ID is CHAOS_NODE (1).
In seconds: CHAOS_WAIT=300 for the node, CHAOS_DELAY=0 before it acts, CHAOS_DURATION (until it is ended).
CHAOS_ROLE=chief|worker|ps|evaluator and CHAOS_RANK=0 choose a task of tf-ps-run for kill-process, stop-process and
memory-overload. CHAOS_WHEN=start|check|training, CHAOS_CLUSTER=PID of a dlrover-run, CHAOS_CPU=node|machine, CHAOS_SIZE=most MiB.
END
}

# Settings: each of these sets VARIABLE from the setting NAME, or refuses what it holds.

whole() { # VARIABLE NAME DEFAULT LEAST MOST
    local value=${!2:-$3}
    [[ $value =~ ^[0-9]{1,9}$ ]] && ((10#$value >= $4 && 10#$value <= $5)) ||
        refuse "$2 is '$value'; it takes a whole number from $4 to $5"
    printf -v "$1" %d "$((10#$value))"
}

milliseconds() { # VARIABLE NAME DEFAULT
    local value=${!2:-$3} part
    [[ $value =~ ^([0-9]{1,7})(\.([0-9]+))?$ ]] || refuse "$2 is '$value'; it takes seconds, as in $2=2.5"
    part=${BASH_REMATCH[3]:-}000
    printf -v "$1" %d "$((10#${BASH_REMATCH[1]} * 1000 + 10#${part:0:3}))"
}

word() { # VARIABLE NAME DEFAULT WORD...
    local value=${!2:-$3} name=$2
    printf -v "$1" %s "$value"
    shift 3
    [[ " $* " == *" $value "* ]] || refuse "$name is '$value'; it takes one of: $*"
}

# What is undone, also after a signal. A signal is handled between two commands, so what may have to be undone is noted
# before it is done.

stopped=() hog='' scored='' file='' answer='' ip=() routes=()

undo() {
    local entry helpers pid start score
    trap '' TERM INT HUP PIPE
    for entry in "${stopped[@]}"; do
        look_again "${entry%:*}" "${entry#*:}" && kill -CONT "${entry%:*}" 2>/dev/null
    done
    IFS=: read -r pid start score <<<"$scored"
    [[ -z $pid ]] || ! look_again "$pid" "$start" || echo "$score" 2>/dev/null >"/proc/$pid/oom_score_adj"
    read -ra helpers -d '' <<<"$(jobs -p) $hog"
    for entry in "${helpers[@]}"; do
        look_at "$entry" && [[ $parent == "$$" ]] && kill -TERM "$entry" 2>/dev/null
        wait "$entry" 2>/dev/null
    done
    [[ -z $file ]] || rm -f -- "$file"
    [[ ! $answer =~ $created ]] || "$blade" destroy "${BASH_REMATCH[1]}" >/dev/null || say "$blade destroy failed"
    # With its last process the network of a node has gone too.
    ((${#ip[@]})) && { [[ ${ip[0]} == ip ]] || look_again "$agent" "$agent_started"; } || return 0
    "${ip[@]}" link set "$device" up || say "$device could not be set up again"
    for entry in "${routes[@]}"; do
        # The kernel brings the routes of the device's own addresses back, and this the others.
        read -ra entry <<<"$entry"
        "${ip[@]}" route replace "${entry[@]}" dev "$device" 2>/dev/null
    done
}

stop() { # PID...: stop these for as long as this script runs
    local pid
    for pid in "$@"; do
        look_at "$pid" && stopped+=("$pid:$started") && kill -STOP "$pid" 2>/dev/null
    done
}

aside() { # COMMAND...: run it so that a signal is handled meanwhile
    "$@" 2>/dev/null &
    wait $!
}

any_stopped() { # false when a user has ended them all, as with workers that hang
    local entry
    for entry in "${stopped[@]}"; do
        look_again "${entry%:*}" "${entry#*:}" && return
    done
    say "$name: the processes that were stopped have gone"
    return 1
}

created='"success": *true.*"result": *"([^"]+)"'
use_blade() { # WORD...: an experiment of chaosblade; false where there is none
    blade=$(type -P blade || type -P chaosblade) || return
    answer=$("$blade" create "$@" "${limit[@]}" 2>&1)
    [[ $answer =~ $created ]] || fail "$name: $blade create $*: $answer"
    say "$name: blade create $*"
}

# The verbs.

kill_process() {
    local turn before='' chosen of=''
    when=$stage
    if [[ $when == check ]]; then
        # As long as the check lasts, for a node that fails once is checked again.
        [[ -n ${CHAOS_TIMES:-} ]] || times=0
        [[ -n ${CHAOS_PERIOD:-} ]] || period=0
    fi
    for ((turn = 1; times == 0 || turn <= times; turn++)); do
        while :; do
            if find_processes; then
                chosen=${processes[place]:-}
                [[ -n $chosen ]] || fail "$name has no local rank $place, for it has ${#processes[@]} of them"
                look_at "$chosen" && [[ $chosen:$started != "$before" ]] && break
            elif ((times == 0)) && find_training; then
                say "$name: its check is over"
                return
            fi
            last 100 true
        done
        before=$chosen:$started
        kill -KILL "$chosen"
        ((times)) && of=" of $times"
        say "$name: killed $meant, process $chosen ($turn$of)"
        ((turn == times)) || last "$period" true
    done
}

kill_node() {
    trap '' TERM INT HUP PIPE
    # Stopped, no process starts another one or reports its end meanwhile, as when a machine loses its power. The agent is
    # the first to be killed, for the end of its watchdog would have it go on.
    below "$agent"
    kill -STOP "$node_root" "$agent" "${tree[@]}" 2>/dev/null
    below "$agent"
    kill -KILL "$agent" "$node_root" "${tree[@]}" 2>/dev/null
    say "$name: killed with all its processes"
}

stop_process() {
    stop "${processes[@]}"
    [[ $program == tf-ps-agent ]] && name+=" ($meant)"
    say "$name: stopped ${#stopped[@]} workers: ${processes[*]}"
    last "$duration" any_stopped
}

hold_back() { # let the node run for a part of each 100 ms
    local pid text held=()
    kill -CONT "${stopped[@]%:*}" 2>/dev/null
    nap "$left"
    kill -STOP "${stopped[@]%:*}" 2>/dev/null
    below "$agent"
    for pid in "${tree[@]}"; do
        text=dlrover-
        read -r text 2>/dev/null <"/proc/$pid/comm"
        # The agent must go on to speak for the node, and the relay and the master are not what is slow.
        [[ $text == dlrover-* ]] || { stop "$pid" && held+=("${stopped[-1]}"); }
    done
    stopped=("${held[@]}")
}

cpu_overload() {
    local turn
    if [[ $cpu == node || -z $cpu && -n $in_cluster ]]; then
        say "$name: runs for $left % of the time"
        pace=$((100 - left)) && last "$duration" hold_back
        return
    fi
    use_blade cpu fullload && last "$duration" true && return
    if type -P stress-ng >/dev/null; then
        stress-ng --quiet --cpu 0 "${limit[@]}" >/dev/null 2>&1 &
        say "$name: stress-ng --cpu 0"
    else
        # Each ends by itself should this script be killed.
        for ((turn = $(nproc); turn > 0; turn--)); do while look_at $$; do :; done & done
        say "$name: $(nproc) loops keep its CPUs busy"
    fi
    last "$duration" true
}

free_memory() { # MiB that may be taken, by the machine and by each control group around this process
    local key value folder most used at
    while read -r key value _; do [[ $key == MemAvailable: ]] && free=$((value / 1024)); done </proc/meminfo
    while IFS=: read -r key value folder; do
        case $value in
        '') set -- /sys/fs/cgroup memory.max memory.current ;;
        *memory*) set -- /sys/fs/cgroup/memory memory.limit_in_bytes memory.usage_in_bytes ;;
        *) continue ;;
        esac
        # In a container the path may be that of the machine, which is not there; its own is the root then.
        for ((; ; )); do
            at=$1$folder
            if read -r most 2>/dev/null <"$at/$2" && read -r used 2>/dev/null <"$at/$3" && [[ $most != max ]]; then
                ((most / 1048576 - used / 1048576 < free)) && free=$(((most - used) / 1048576))
            fi
            [[ -n ${folder%/} ]] || break
            folder=${folder%/*}
        done
    done </proc/self/cgroup
}

task_group() { # PID: the folder of the control group that limits a task's memory, its limit and its own use in MiB
    local key value folder limit_file
    while IFS=: read -r key value folder; do
        [[ ${folder##*/} == tf-ps-run.* ]] || continue
        case $value in
        '') group=/sys/fs/cgroup limit_file=memory.max key=anon ;;
        *memory*) group=/sys/fs/cgroup/memory limit_file=memory.limit_in_bytes key=total_rss ;;
        *) continue ;;
        esac
        # In a container the path may be that of the machine.
        [[ -d $group$folder ]] && group+=$folder || group+=/${folder##*/}
        read -r value 2>/dev/null <"$group/$limit_file" && group_limit=$((value / 1048576)) || return
        while read -r folder value; do [[ $folder == "$key" ]] && group_used=$((value / 1048576)); done <"$group/memory.stat"
        return 0
    done <"/proc/$1/cgroup"
    return 1
}

hold_memory() { # MiB [GROUP]: take memory, in a control group if one is named, until this script ends
    local feed group=${2:-}
    # What `tail` is given without the end of a line it keeps until its input ends, which is with this script.
    if [[ -z $group ]]; then
        exec {feed}> >(exec tail >/dev/null)
        hog=$!
        # If memory runs out after all, the kernel takes this and nothing else.
        echo 1000 >"/proc/$hog/oom_score_adj"
    else
        exec {feed}> >(echo "$BASHPID" 2>/dev/null >"$group/cgroup.procs" && exec tail >/dev/null)
        hog=$!
    fi
    aside head -c "${1}M" /dev/zero 1>&"$feed"
}

task_lives() { # false when it was killed for memory
    look_again "$chosen" "$chosen_started" && return
    say "$name: $meant has ended"
    return 1
}

overload_task() {
    local free=0 group='' group_limit=0 group_used=0 amount score chosen=${processes[0]} chosen_started
    look_at "$chosen" && chosen_started=$started || fail "$name: $meant has ended"
    task_group "$chosen" || refuse "$meant has no control group of its own: give --worker-memory or --ps-memory, and" \
        "let tf-ps-run create control groups (as root, or in a group that was delegated to it)"
    # With what the task uses itself this is more than its limit, and without it less.
    amount=$((group_limit - group_used / 2))
    ((amount <= most)) || amount=$most
    free_memory
    ((amount <= free)) || fail "$name: $amount MiB are needed to reach the limit of $meant, and $free MiB are free"
    say "$name: $meant uses $group_used of $group_limit MiB; $amount MiB are taken from it"
    # In this group the kernel is to kill the task and not what takes the memory.
    read -r score <"/proc/$chosen/oom_score_adj"
    scored="$chosen:$chosen_started:$score"
    echo 1000 >"/proc/$chosen/oom_score_adj" || fail "$name: $meant belongs to another user"
    hold_memory "$amount" "$group"
    if ! look_at "$hog" && look_again "$chosen" "$chosen_started"; then
        fail "$name: the control group of $meant cannot be entered, which takes root"
    fi
    last "$duration" task_lives
}

memory_overload() {
    local free=0 amount
    if [[ -n $chosen_role ]]; then
        overload_task
        return
    fi
    free_memory
    amount=$((free * share / 100))
    ((amount <= most)) || amount=$most
    ((amount > 0)) || fail "$name: no memory is free"
    use_blade mem load --mode ram --mem-percent "$share" && last "$duration" true && return
    if type -P stress-ng >/dev/null; then
        stress-ng --quiet --vm 1 --vm-keep --vm-bytes "${amount}M" "${limit[@]}" >/dev/null 2>&1 &
    else
        hold_memory "$amount"
    fi
    say "$name: $amount of $free MiB of free memory are taken"
    last "$duration" true
}

network_loss() {
    local own other
    type -P ip >/dev/null || fail "network-loss needs the command ip (package iproute2)"
    own=$(readlink /proc/self/ns/net)
    other=$(readlink "/proc/$agent/ns/net") || fail "$name: its network cannot be seen; root can"
    if [[ $own != "$other" ]]; then
        type -P nsenter >/dev/null || fail "network-loss needs the command nsenter (package util-linux)"
        device=${CHAOS_INTERFACE:-eth0}
        ip=(nsenter -t "$agent" -n ip)
    elif [[ -n $in_cluster ]]; then
        refuse "$name has no network of its own that could be cut; start the job with --isolate-nodes"
    else
        # The number of the first namespace of a machine: there, this would cut off the users of it.
        [[ -z ${CHAOS_INTERFACE:-} && $(readlink /proc/self/ns/pid) == 'pid:[4026531836]' ]] &&
            refuse "this is no container; CHAOS_INTERFACE=NAME cuts that network of the whole machine nevertheless"
        device=${CHAOS_INTERFACE:-$(ip -o route show default)}
        [[ $device =~ \ dev\ ([^ ]+) ]] && device=${BASH_REMATCH[1]}
        [[ -n $device ]] || fail "$name: there is no default route; CHAOS_INTERFACE=NAME says what to cut"
        use_blade network loss --percent 100 --interface "$device" && last "$duration" true && return
        ip=(ip)
    fi
    mapfile -t routes < <("${ip[@]}" route show dev "$device")
    other=$("${ip[@]}" link set "$device" down 2>&1) ||
        { ip=() && fail "$name: $device cannot be set down, which takes root or NET_ADMIN: $other"; }
    say "$name: $device is down"
    last "$duration" true
}

disk_full() {
    local path ballast size blocks free amount
    read_variables "$agent"
    path=${CHAOS_PATH:-${tmpdir:-/tmp}}
    [[ -d $path && -w $path ]] || fail "$path is no directory that can be written to"
    [[ -n ${CHAOS_PATH:-} || $(stat -c %d "$path") != "$(stat -c %d /)" ]] ||
        refuse "$path is on the disk of /; CHAOS_PATH=$path fills that nevertheless"
    read -r size blocks free < <(stat -f -c '%S %a %f' "$path")
    # Only root may take what a file system keeps in reserve.
    amount=$(((EUID ? blocks : free) * size / 1048576 - leave))
    ((amount <= most)) || amount=$most
    ((amount > 0)) || fail "$path: no more than CHAOS_LEAVE=$leave MiB are free already"
    file=$(mktemp "$path/.start_chaos.XXXXXX") && exec {ballast}>"$file" || fail "$path cannot be filled"
    # Without a name it is the kernel that frees it with this process, however that ends.
    rm -- "$file"
    aside fallocate -l "${amount}M" "/proc/$$/fd/$ballast" || aside head -c "${amount}M" /dev/zero 1>&"$ballast"
    say "$name: $amount MiB of $path are taken"
    last "$duration" true
}

(($# == 1)) || refuse "it takes one verb; start_chaos.sh --help names them"
case $1 in
-h | --help) usage && exit ;;
no-chaos) say "no chaos" && exit ;;
kill-process) word when CHAOS_WHEN '' '' check training ;;
stop-process) word when CHAOS_WHEN training check training ;;
kill-node | network-loss) word when CHAOS_WHEN training start check training ;;
# A node check that comes first is to meet these too.
cpu-overload | memory-overload | disk-full) word when CHAOS_WHEN start start check training ;;
*) refuse "there is no '$1'; start_chaos.sh --help names what there is" ;;
esac
word cpu CHAOS_CPU '' '' node machine
word chosen_role CHAOS_ROLE '' '' chief worker ps evaluator
case $1:$chosen_role in
*: | kill-process:* | stop-process:* | memory-overload:*) ;;
*) refuse "$1 acts on a node, and CHAOS_ROLE=$chosen_role is a task" ;;
esac
[[ -z $chosen_role ]] || when=training
whole chosen_rank CHAOS_RANK 0 0 100000
whole times CHAOS_TIMES 1 1 1000000
whole place CHAOS_LOCAL_RANK 0 0 100000
whole left CHAOS_CPU_LEFT 10 1 99
whole share CHAOS_MEMORY 80 1 95
whole leave CHAOS_LEAVE 0 0 999999999
whole most CHAOS_SIZE 999999999 1 999999999
whole _ CHAOS_CLUSTER 0 0 999999999
milliseconds patience CHAOS_WAIT 300
milliseconds delay CHAOS_DELAY 0
milliseconds period CHAOS_PERIOD 30
[[ -z ${CHAOS_DURATION:=} ]] && duration='' || milliseconds duration CHAOS_DURATION ''
limit=(${duration:+--timeout $(((duration + 999) / 1000))}) # for blade and stress-ng: this script may be killed

trap undo EXIT
trap 'exit 129' HUP && trap 'exit 130' INT && trap 'exit 141' PIPE && trap 'exit 143' TERM
await_node
"${1//-/_}"
