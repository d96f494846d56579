# Which processes the chosen node of a job has, for start_chaos.sh, which reads this file.
#
# Processes are looked at with what bash has built in: a look that forks would be a load on the node by itself.
# shellcheck shell=bash disable=SC2015,SC2034,SC2154 # The other file sets and reads variables of this one.

say() { printf 'start_chaos: %s\n' "$*" 2>/dev/null; }
refuse() { say "$@" >&2; exit 2; }
fail() { say "$@" >&2; exit 1; }

# Time. To wait for a pipe to which nothing is written is a sleep that needs no process, and that a signal ends.

exec {nothing}<> <(:)
pace=200 # milliseconds between two looks

nap() { # MILLISECONDS
    local limit
    printf -v limit '%d.%03d' $(($1 / 1000)) $(($1 % 1000))
    read -rt "$limit" -u "$nothing" || :
}

tell_time() { # milliseconds, which no change of the clock moves
    local up
    read -r up _ </proc/uptime
    now=$((10#${up/./} * 10))
}

last() { # MILLISECONDS COMMAND: wait so long ('': as long as it takes), while COMMAND succeeds and the node lives
    local end rest=$pace
    tell_time
    end=$((now + ${1:-0}))
    while "$2"; do
        look_again "$agent" "$agent_started" || { say "$name has gone"; exit 0; }
        if [[ -n $1 ]]; then
            ((now < end)) || return 0
            rest=$((end - now < pace ? end - now : pace))
        fi
        nap "$rest"
        tell_time
    done
}

# Processes.

look_at() { # PID: its parent, session, terminal and start; false where it has ended
    local text=''
    IFS= read -rd '' text 2>/dev/null <"/proc/$1/stat"
    [[ -n $text ]] || return
    # The name in parentheses may hold anything; what follows are single words.
    # shellcheck disable=SC2086
    set -- ${text##*) }
    parent=$2 session=$4 terminal=$5 started=${20}
    [[ $1 != [ZX] ]]
}

look_again() { # PID START: the same; false too where the number was given to another process
    look_at "$1" && [[ $started == "$2" ]]
}

read_command() { # PID
    local words=()
    mapfile -d '' -t words 2>/dev/null <"/proc/$1/cmdline"
    command="${words[*]} "
}

read_variables() { # PID: what its environment says of the job
    local entry entries=()
    node='' cluster='' rank='' local_world='' run_id='' tmpdir='' role='' role_rank='' task_id='' version=''
    mapfile -d '' -t entries 2>/dev/null <"/proc/$1/environ"
    for entry in "${entries[@]}"; do
        case $entry in
        DLROVER_LOCAL_NODE=*) node=${entry#*=} ;;
        DLROVER_LOCAL_CLUSTER=*) cluster=${entry#*=} ;;
        RANK=*) rank=${entry#*=} ;;
        LOCAL_WORLD_SIZE=*) local_world=${entry#*=} ;;
        TORCHELASTIC_RUN_ID=*) run_id=${entry#*=} ;;
        TMPDIR=*) tmpdir=${entry#*=} ;;
        WORKER_TYPE=*) role=${entry#*=} ;;
        WORKER_RANK=*) role_rank=${entry#*=} ;;
        WORKER_ID=*) task_id=${entry#*=} ;;
        TF_PS_VERSION=*) version=${entry#*=} ;;
        esac
    done
}

below() { # PID...: the processes below these, but for this script
    local list pid more next=("$@")
    tree=()
    while ((${#next[@]})); do
        for list in "/proc/${next[0]}"/task/*/children; do
            more=()
            [[ -e $list ]] && read -ra more 2>/dev/null <"$list"
            for pid in "${more[@]}"; do
                [[ $pid == "$$" ]] || tree+=("$pid") next+=("$pid")
            done
        done
        next=("${next[@]:1}")
    done
}

# The node.

[[ -e /proc/$$/task/$$/children ]] || fail "this kernel has no /proc/PID/task/TID/children"
look_at 1 && session_of_init=$session
look_at $$ && own_session=$session
look_at "$own_session" && leader_started=$started || leader_started=''
# Where this script was brought into a container, alone or from a terminal, the job is that of the container. In any
# other session it is the command that started this script which starts the job too.
brought=''
[[ $own_session == "$$" || -z $leader_started || $terminal != 0 ]] && brought=yes

find_root() { # AGENT PARENT NUMBER: the node's watchdog; its agent where the parent is none, as under torchrun
    root=$1
    read_command "$2"
    # An agent whose watchdog has died is the child of a process that is no part of the node.
    [[ $command == *@(dlrover|tf[_-]ps)[_-]run* ]] && read_variables "$2" && [[ $node == "$3" ]] && root=$2
}

find_node() { # the agent of the node that is meant; false as long as there is none
    local folder text pid root number owner weight best=0 newest=0 found=()
    job='' elsewhere='' agent=''
    for folder in /proc/[0-9]*; do
        text='' pid=${folder#/proc/}
        [[ -O $folder ]] && read -r text 2>/dev/null <"$folder/comm"
        # A role is one of tf-ps-run.
        [[ $text == tf-ps-agent || $text == dlrover-agent && -z $chosen_role ]] && look_at "$pid" && read_variables "$pid" || continue
        number=$node owner=$cluster
        find_root "$pid" "$parent" "$number"
        owner=${owner:-$root}
        look_at "$owner" || continue
        # What was started beside this script is meant, or what its container was started for. Any other job may be
        # somebody's work, and is left alone unless it is named.
        weight=0
        [[ -n $brought && $session == "$session_of_init" ]] && weight=1
        [[ $session == "$own_session" ]] && weight=2
        [[ -z ${CHAOS_CLUSTER:-} ]] || { [[ $owner == "$CHAOS_CLUSTER" ]] && weight=3 || weight=-1; }
        ((weight == 0)) && elsewhere=$owner
        ((weight > 0)) || continue
        ((weight > best || weight == best && started > newest)) && best=$weight newest=$started job=$owner
        found+=("$owner $pid $root $text $number")
    done
    for text in "${found[@]}"; do
        read -r owner pid root program number <<<"$text"
        [[ $owner == "$job" ]] || continue
        in_cluster=$number wanted=${CHAOS_NODE:-${number:+${WORKER_ID:-}}}
        wanted=${wanted:-1}
        number=${number:-${WORKER_ID:-$wanted}}
        # The node of a role is the one that runs its task.
        [[ -z $chosen_role ]] || wanted=$number
        if [[ $number == "$wanted" ]]; then
            look_at "$pid" && agent=$pid agent_started=$started node_root=$root name="node $number"
        elif [[ -z $in_cluster ]]; then
            say "this is node $number, and the chaos is for node $wanted: nothing is done here"
            exit 0
        fi
    done
    [[ -n $agent ]]
}

find_check() { # the processes of the node's check
    find_ranks '*/node_check/check *' ''
}

find_training() { # the node's workers; of tf-ps-run the task of one role and rank
    if [[ $program == tf-ps-agent ]]; then find_task; else find_ranks '*' '*_dlrover_template*'; fi
}

find_ranks() { # PATTERN OTHERS: one process for each local rank, whose command is like PATTERN and not like OTHERS
    local pid by_rank=() starts=() size=1
    for pid in "${tree[@]}"; do
        # Each is a child of the agent and leads a session, which one that was forked a moment ago does not yet.
        look_at "$pid" && [[ $parent == "$agent" && $session == "$pid" ]] && read_variables "$pid" &&
            [[ $local_world =~ ^[1-9][0-9]*$ ]] || continue
        read_command "$pid"
        # The template of a forkserver has the environment of the first worker if that is all that there is.
        # shellcheck disable=SC2053 # These are patterns.
        [[ $command == $1 && $command != $2 ]] || continue
        if [[ -z $2 ]]; then
            rank=$pid
        else
            [[ -n $run_id && $rank =~ ^(0|[1-9][0-9]*)$ ]] || continue
        fi
        # A service that a worker has detached is given to the agent too, and is known by being younger.
        ((started < ${starts[rank]:-started + 1})) && by_rank[rank]=$pid starts[rank]=$started
        size=$local_world
    done
    processes=("${by_rank[@]}") meant="local rank $place"
    ((${#processes[@]} >= size))
}

find_task() { # the task of a role and rank; while it is being replaced, the one that was there first
    local pid oldest=0
    processes=() place=0
    for pid in "${tree[@]}"; do
        look_at "$pid" && [[ $parent == "$agent" && $session == "$pid" ]] && read_variables "$pid" &&
            [[ -n $version && $role == "${chosen_role:-worker}" && $role_rank == "$chosen_rank" ]] || continue
        read_command "$pid"
        [[ $command == *_dlrover_template* ]] && continue
        ((oldest == 0 || started < oldest)) && oldest=$started processes=("$pid") meant="$role-$task_id"
    done
    ((oldest))
}

find_processes() { # the processes that `when` means, or the first that there are, and the `stage` that the node is at; false until all are there
    below "$agent"
    for stage in check training; do
        [[ -z $when || $when == "$stage" ]] && "find_$stage" && return
    done
    return 1
}

await_node() {
    local end seen='' told='' why
    tell_time
    end=$((now + patience))
    until find_node && { [[ $when == start ]] || find_processes; }; do
        [[ -n $seen && -z $job ]] && fail "the job has ended; nothing was done"
        [[ -n $job ]] && seen=yes
        [[ -n $elsewhere && -z $job && -z $told ]] && told=yes &&
            say "waits for a dlrover-run of this session; CHAOS_CLUSTER=$elsewhere chooses that of process $elsewhere"
        # The leader of this session, a terminal or a container's command, was to start the job.
        [[ -n $job || -z $leader_started || -n ${CHAOS_CLUSTER:-} ]] || look_again "$own_session" "$leader_started" ||
            fail "the process that was to start the job has ended; nothing was done"
        if ((now >= end)); then
            why="there is no $([[ -n $chosen_role ]] && echo tf-ps-run || echo dlrover-run)"
            [[ -n $job ]] && why="the dlrover-run of process $job has no node $wanted"
            [[ -n $agent ]] && why="$name has not come to its ${when:-workers}"
            [[ -n $agent && -n $chosen_role ]] && why="$name does not run $chosen_role $chosen_rank"
            fail "nothing was done within CHAOS_WAIT=${CHAOS_WAIT:-300} s: $why"
        fi
        nap 200
        tell_time
    done
    last "$delay" true
}
