// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command versions runs the end-to-end tests of attaching and detaching on each Kubernetes and containerd that the lab
// has, one after the other, and prints a table. It is run in the repository's root, with the programs in bin.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab"
)

// attachAndDetach are the tests that show devices attached to pods and brought home, after trouble too.
var attachAndDetach = []string{
	"TestDummy",
	"TestHostNetwork", "TestSandboxAgain", "TestAltNames", "TestSecondDeviceVanishes", // attach
	"TestPodChangesInterface", "TestNamespaceGone", "TestNameTaken", // detach
}

// lastCDISwitch is the last containerd of the list that can have CDI off.
const lastCDISwitch = "2.1.9"

// combination is what the tests are run on.
type combination struct {
	kubernetes, containerd string
	cdi                    string // as the lab's option
}

func (c combination) String() string {
	name := "kubernetes-" + c.kubernetes + "-containerd-" + c.containerd
	if c.cdi != "" {
		name += "-cdi-" + c.cdi
	}
	return name
}

// combinations has each Kubernetes with the default containerd, each containerd with the default Kubernetes, and one
// without CDI.
func combinations(kubernetes, containerd []string) []combination {
	var all []combination
	for _, k := range kubernetes {
		all = append(all, combination{kubernetes: k, containerd: lab.DefaultContainerd})
	}
	for _, c := range containerd {
		if c != lab.DefaultContainerd {
			all = append(all, combination{kubernetes: lab.DefaultKubernetes, containerd: c})
		}
	}
	return append(all, combination{kubernetes: lab.DefaultKubernetes, containerd: lastCDISwitch, cdi: "off"})
}

// result is what became of a combination's tests.
type result struct {
	combination
	tests   []string
	failed  map[string]string // why, by test
	passed  int
	took    time.Duration
	logPath string
}

func main() {
	only := flag.String("only", "", "run combinations alone whose name contains this, such as containerd-1.7")
	tests := flag.String("tests", strings.Join(attachAndDetach, ","), "end-to-end tests to run")
	dir := flag.String("dir", filepath.Join("_out", "versions"), "directory of the logs and the clusters' data")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := run(ctx, *dir, *only, strings.Split(*tests, ",")); err != nil {
		fmt.Fprintln(os.Stderr, "versions:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, dir, only string, tests []string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	kubernetes, containerd, err := lab.Versions()
	if err != nil {
		return err
	}
	chosen := slices.DeleteFunc(combinations(kubernetes, containerd), func(c combination) bool { return !strings.Contains(c.String(), only) })
	if len(chosen) == 0 {
		return fmt.Errorf("no combination's name contains %q", only)
	}
	var results []result
	for _, c := range chosen {
		fmt.Fprintln(os.Stderr, c)
		r, err := c.test(ctx, filepath.Join(dir, c.String()), tests)
		if err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
		results = append(results, r)
		if ctx.Err() != nil {
			break
		}
	}
	writeTable(os.Stdout, results)
	if slices.ContainsFunc(results, func(r result) bool { return len(r.failed) > 0 }) {
		return errors.New("tests failed")
	}
	return ctx.Err()
}

// test builds the versions and runs the tests on them.
func (c combination) test(ctx context.Context, dir string, tests []string) (result, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return result{}, err
	}
	if _, err := lab.Build(ctx, lab.BuildOptions{Kubernetes: c.kubernetes, Containerd: c.containerd, Progress: os.Stderr}); err != nil {
		return result{}, err
	}
	r := result{combination: c, tests: tests, logPath: filepath.Join(dir, "test.log")}
	log, err := os.Create(r.logPath)
	if err != nil {
		return r, err
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, "go", "test", "-vet=off", "-count=1", "-json", "-timeout=40m", "-parallel=2",
		"-run=^("+strings.Join(tests, "|")+")$", "./test/e2e")
	// go test does not end what it has started. The cluster ends with the tests' program.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.Env = append(os.Environ(), "NETWORKDRIVER_REQUIRE=lab", "NETWORKDRIVER_E2E_STATE="+filepath.Join(dir, "state"),
		lab.KubernetesEnv+"="+c.kubernetes, lab.ContainerdEnv+"="+c.containerd, lab.CDIEnv+"="+c.cdi)
	cmd.Stderr = log
	events, err := cmd.StdoutPipe()
	if err != nil {
		return r, err
	}
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return r, err
	}
	r.read(events, io.MultiWriter(log, os.Stderr))
	err = cmd.Wait()
	r.took = time.Since(start).Round(time.Second)
	if err != nil && len(r.failed) == 0 {
		return r, fmt.Errorf("%w; %s", err, r.logPath)
	}
	return r, nil
}

// read reads what go test -json says and passes the tests' own words on. A test that does not report is a failure.
func (r *result) read(events io.Reader, words io.Writer) {
	r.failed = map[string]string{}
	output := map[string][]string{}
	done := map[string]bool{}
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e struct{ Action, Test, Output string }
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			e.Action, e.Output = "output", lines.Text()+"\n" // of go test itself
		}
		test, _, _ := strings.Cut(e.Test, "/")
		switch {
		case e.Action == "output" || e.Action == "build-output":
			_, _ = io.WriteString(words, e.Output)
			output[test] = append(output[test], e.Output)
		case e.Test == "" || e.Test != test:
		case e.Action == "pass":
			done[test] = true
			r.passed++
		case e.Action == "fail" || e.Action == "skip":
			done[test] = true
			r.failed[test] = why(output[test])
		}
	}
	if err := lines.Err(); err != nil {
		output[""] = append(output[""], "reading what go test says: "+err.Error())
	}
	for _, test := range r.tests {
		if !done[test] {
			r.failed[test] = "did not end: " + why(append(output[""], output[test]...))
		}
	}
}

// why returns the words of a test that say why it failed: the error of its first failed requirement, or else its last line.
func why(output []string) string {
	last := ""
	for _, line := range output {
		line = strings.TrimSpace(line)
		if text, ok := strings.CutPrefix(line, "Error:"); ok {
			return strings.TrimSpace(text)
		}
		if file, text, ok := strings.Cut(line, ".go:"); ok && !strings.Contains(file, " ") {
			if _, text, ok := strings.Cut(text, ": "); ok {
				return text
			}
		}
		if line != "" && !strings.HasPrefix(line, "---") && !strings.HasPrefix(line, "===") && !strings.HasPrefix(line, "FAIL") {
			last = line
		}
	}
	return last
}

func writeTable(w io.Writer, results []result) {
	fmt.Fprint(w, "| Kubernetes | containerd | CDI | Passed | Failed | Time |\n|---|---|---|---|---|---|\n")
	for _, r := range results {
		cdi := r.cdi
		if cdi == "" {
			cdi = "default"
		}
		var failed []string
		for _, test := range r.tests {
			if _, ok := r.failed[test]; ok {
				failed = append(failed, test)
			}
		}
		fmt.Fprintf(w, "| %s | %s | %s | %d of %d | %s | %s |\n", r.kubernetes, r.containerd, cdi, r.passed, len(r.tests),
			strings.Join(failed, ", "), r.took)
	}
	for _, r := range results {
		for _, test := range r.tests {
			if reason, ok := r.failed[test]; ok {
				fmt.Fprintf(w, "\n%s: %s: %s\n(%s)\n", r, test, reason, r.logPath)
			}
		}
	}
}
