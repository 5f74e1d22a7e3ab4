# shellcheck shell=bash
# The help texts of `run`, which sources this file. No line is longer than 80 columns.

usage() {
  printf 'usage: ./run VERB [options]\n\n'
  ! has_verb tutorial || cat <<'END'
  tutorial     run the three scripts in sequence: pretrain, finetune, predict
END
  cat <<'END'
  tests        run the short test suite; with --all, the long tests, too
END
  local title verb
  while IFS=$'\t' read -r title verb; do
    title=${title#Stage ?: }
    printf '  %-13s' "$verb"
    wrap 15 "${title%%[.:]*}"
  done < <(scripts)
  cat <<'END'
  layout       show what each rank of a cluster would store and communicate,
               without the cluster
  tensorboard  show the curves of the runs in a browser
END
  ! is_tutorial || cat <<'END'
  notebook     open the tutorial's notebook in Jupyter, or renew its output
  benchmarks   measure speed, memory and accuracy, and write
               benchmarks/RESULTS.md
  new          create a project of your own from the tutorial or an example
END
  cat <<'END'
  setup        only set up .venv, also for a machine without a network

`./run VERB --help` shows the options of a verb. The first start sets up .venv.
Two variables change this: PYTHON=3.12 or PYTHON=/path/to/python selects the
Python, and VENV=/path replaces .venv.
END
}

# INDENT TEXT: prints a text whose first line begins at column INDENT, wrapped at 80 columns.
wrap() {
  local word words line=""
  read -ra words <<<"$2"
  for word in "${words[@]}"; do
    if (($1 + ${#line} + ${#word} + 1 > 80)); then
      printf '%s\n%*s' "$line" "$1" ""
      line=$word
    else
      line=${line:+$line }$word
    fi
  done
  printf '%s\n' "$line"
}

help_of() { # VERB: prints the help text of a verb that is no script of this project
  case $1 in
    tests) tests_usage ;;
    setup) setup_usage ;;
    tensorboard) tensorboard_usage ;;
    notebook) notebook_usage ;;
    *) return 1 ;;
  esac
}

tests_usage() {
  cat <<'END'
usage: ./run tests [FILE...] [options]

Runs the short test suite of this project, in parallel. FILE is a test file or a
folder of test files.

END
  ! grep -qs -e '"--all"' "$root/tests/conftest.py" || cat <<'END'
  --all            Run the tests marked long, too. They take an hour or more.
END
  ! grep -qs -e '"--minutes"' "$root/tests/conftest.py" || cat <<'END'
  --minutes N      After N minutes, start no further test marked long.
  --data-dir PATH  Folder that contains MNIST/raw, for tests on the real images;
                   by default MNIST_DATA_DIR, data or ../shared/data. Without
                   these images, such tests are skipped.
END
  cat <<'END'
  -n 0             Run the tests one after the other, in one process.
  -k WORDS         Run only tests whose name contains these words.
  -x               Stop at the first failed test.

All other options are pytest's:

END
}

setup_usage() {
  local names
  mapfile -t names < <(groups)
  cat <<'END'
usage: ./run setup [GROUP...]
       ./run setup --download DIR | --wheels DIR | --venv DIR

Sets up .venv with the packages of requirements.lock, and does nothing more.
Packages that are installed already are kept.

END
  printf '  GROUP           '
  wrap 18 "Add the packages of locks/GROUP.lock. The groups are: ${names[*]}."
  cat <<'END'
  --download DIR  Download the wheels of all groups into a folder.
  --wheels DIR    Install from this folder, on a machine without a network.
  --venv DIR      Use the packages of an existing environment.

PYTHON=3.12 or PYTHON=/path/to/python selects the Python, and VENV=/path
replaces .venv.
END
}

tensorboard_usage() {
  cat <<'END'
usage: ./run tensorboard [options]

Shows the curves of the runs in a browser, also while a run trains.

  --logdir DIR  Folder that contains the runs. (default: runs)
  --port PORT   Port of the server. (default: 6006)
  --bind_all    Let other machines connect, for example to a container.
  --helpfull    Show all options of TensorBoard.
END
}

notebook_usage() {
  cat <<'END'
usage: ./run notebook [options]
       ./run notebook --renew

Opens the tutorial's notebook in Jupyter. The first start installs Jupyter.

  --renew       Execute the notebook, and write its output into the file.
  --no-browser  Only print the address of the server.
  --port PORT   Port of the server. (default: 8888)
  --ip ADDRESS  Address that the server listens at. (default: localhost)
  --help-all    Show all options of Jupyter.

The variable MNIST_DATA_DIR names the folder that contains MNIST/raw. Without
this variable, the notebook reads the folder that the runs used, else data.
END
}
