// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package program

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/pkg/lastlog"
)

type config struct {
	FromFlag, FromEnv, FromDir, FromDefault string
	Number                                  int
}

func (c config) Flags(flags *pflag.FlagSet) {
	for _, name := range []string{"from-flag", "from-env", "from-dir", "from-default"} {
		flags.String(name, "default", "")
	}
	flags.Int("number", 1, "")
}

// execute runs a program of one cell and returns the configuration that it got and what it logged.
func execute(t *testing.T, args ...string) (got config, log string, err error) {
	t.Helper()
	mask := syscall.Umask(0)
	syscall.Umask(mask)
	t.Cleanup(func() { syscall.Umask(mask) })
	var out bytes.Buffer
	cmd := Command("test", "A test", cell.SimpleHealthCell, job.Cell, cell.Module("test", "Test",
		cell.Config(config{}),
		cell.Invoke(func(c config, _ job.Group, s hive.Shutdowner) {
			got = c
			s.Shutdown()
		}),
	))
	cmd.SetArgs(args)
	cmd.SetErr(&out)
	cmd.SetOut(&out)
	err = cmd.Execute()
	return got, out.String(), err
}

func TestPrecedence(t *testing.T) {
	dir := t.TempDir()
	data := filepath.Join(dir, "..2026_01_01")
	require.NoError(t, os.Mkdir(data, 0o755))
	for _, name := range []string{"from-flag", "from-env", "from-dir", "stranger"} {
		require.NoError(t, os.WriteFile(filepath.Join(data, name), []byte("dir\n"), 0o600))
		require.NoError(t, os.Symlink(filepath.Join(data, name), filepath.Join(dir, name)))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "number"), []byte("7"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "debug"), []byte("true"), 0o600))
	t.Setenv("CILIUM_FROM_FLAG", "env")
	t.Setenv("CILIUM_FROM_ENV", "env")
	t.Setenv("CILIUM_CONFIG_DIR", dir)

	got, log, err := execute(t, "--from-flag", "flag")
	require.NoError(t, err)
	require.Equal(t, config{FromFlag: "flag", FromEnv: "env", FromDir: "dir", FromDefault: "default", Number: 7}, got)
	require.Contains(t, log, "files=[stranger]")
}

// TestLastLog: what a program logs it can tell itself.
func TestLastLog(t *testing.T) {
	mask := syscall.Umask(0)
	syscall.Umask(mask)
	t.Cleanup(func() { syscall.Umask(mask) })
	var out bytes.Buffer
	var ring *lastlog.Ring
	cmd := Command("test", "A test", cell.SimpleHealthCell, job.Cell, cell.Module("test", "Test",
		cell.Invoke(func(r *lastlog.Ring, log *slog.Logger, s hive.Shutdowner) {
			ring = r
			log.Warn("A word of the test's")
			s.Shutdown()
		}),
	))
	cmd.SetArgs(nil)
	cmd.SetErr(&out)
	require.NoError(t, cmd.Execute())
	require.Contains(t, out.String(), "A word of the test's")
	require.Equal(t, out.String(), string(ring.Lines()))
}

func TestMistakes(t *testing.T) {
	_, _, err := execute(t, "--config-dir", "/does/not/exist")
	require.ErrorContains(t, err, "--config-dir: open /does/not/exist")
	_, _, err = execute(t, "--log-format", "xml")
	require.EqualError(t, err, `--log-format: "xml" is neither text nor json`)
	_, _, err = execute(t, "--nonsense")
	require.ErrorContains(t, err, "--nonsense")
	_, _, err = execute(t, "nonsense")
	require.Error(t, err)
	t.Setenv("CILIUM_NUMBER", "many")
	_, _, err = execute(t)
	require.ErrorContains(t, err, "many")
}

func TestLogFormat(t *testing.T) {
	_, log, err := execute(t, "--log-format", "json")
	require.NoError(t, err)
	require.Contains(t, log, `"msg":"Starting"`)
	_, log, err = execute(t, "--version")
	require.NoError(t, err)
	require.Contains(t, log, "dev (")
}
