// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/networkdriver/test/lab"
)

// round is what became of one round.
type round struct {
	// Seconds is how long it took from the fault until everything was as it has to be.
	Seconds float64
	// Left is what was not as it has to be; empty if all was.
	Left string `json:",omitempty"`
	// Notes are figures and sights that are no deviation.
	Notes []string `json:",omitempty"`
	// Containers are those that started.
	Containers containers `json:",omitempty"`
}

// line is what became of one fault.
type line struct {
	Group, Fault, Says string
	Rounds             []round
}

// reportFile is the report as it is kept.
type reportFile struct {
	Started                string
	Kubernetes, Containerd string
	Seed                   int64
	Lines                  map[string]*line
}

// report is what is written after each round.
type report struct {
	dir, page string
	over      func() bool

	mu   sync.Mutex // guards the fields below and the files
	file reportFile
}

func openReport(o options) (*report, error) {
	r := &report{dir: o.out, page: o.page, over: func() bool { return false }, file: reportFile{
		Started: time.Now().UTC().Format(time.DateOnly), Kubernetes: lab.DefaultKubernetes, Containerd: lab.DefaultContainerd,
		Seed: o.seed, Lines: map[string]*line{},
	}}
	if !o.resume {
		return r, nil
	}
	data, err := os.ReadFile(r.path())
	if errors.Is(err, os.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &r.file)
	}
	if err != nil {
		return nil, fmt.Errorf("report of an earlier run: %w", err)
	}
	return r, nil
}

func (r *report) path() string { return filepath.Join(r.dir, "report.json") }

// missing is how many rounds of the job the report does not have.
func (r *report) missing(j job) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.file.Lines[j.name()]; l != nil {
		return max(0, j.rounds-len(l.Rounds))
	}
	return j.rounds
}

// add notes a round, writes the files, and shows it.
func (r *report) add(j job, done round) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.file.Lines[j.name()]
	if l == nil {
		l = &line{}
		r.file.Lines[j.name()] = l
	}
	l.Group, l.Fault, l.Says = j.group, j.fault, j.says
	l.Rounds = append(l.Rounds, done)
	state := "ok"
	if done.Left != "" {
		state = "LEFT: " + done.Left
	}
	fmt.Printf("%s %-55s %6.1f s  %s %s\n", time.Now().Format(time.TimeOnly), j.name(), done.Seconds, state, strings.Join(done.Notes, "; "))
	return r.writeLocked()
}

// write writes the report and its page.
func (r *report) write() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.writeLocked()
}

// writeLocked is write with the lock held.
func (r *report) writeLocked() error {
	data, err := json.MarshalIndent(r.file, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(r.path(), data, 0o644); err != nil {
		return err
	}
	page := []byte(r.markdown())
	if err := os.WriteFile(filepath.Join(r.dir, "faults.md"), page, 0o644); err != nil {
		return err
	}
	if r.page == "" {
		return nil
	}
	return os.WriteFile(r.page, page, 0o644)
}

// verdict is an error that names what is not as it has to be.
func (r *report) verdict(jobs []job) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var bad, missing []string
	for _, j := range jobs {
		l := r.file.Lines[j.name()]
		switch {
		case l == nil:
			missing = append(missing, j.name())
		case slices.ContainsFunc(l.Rounds, func(r round) bool { return r.Left != "" }):
			bad = append(bad, j.name())
		}
	}
	if len(missing) > 0 {
		fmt.Printf("%d faults were not tried: %s\n", len(missing), strings.Join(missing, ", "))
	}
	if len(bad) > 0 {
		return fmt.Errorf("not everything is repaired after: %s", strings.Join(bad, ", "))
	}
	return nil
}

// header begins the page.
const header = `# What was tried to break it

What goes wrong around the driver was tried on emulated nodes, and what became of it is below: "repaired" counts the rounds
after which the node was as before, every pod had its device where it has to be, no container had started without it, and no
frame had left a VF outside of its VLAN. The time is from the fault until that was so, the shortest, the median and the longest; it
holds kubelet's own pauses between two tries. Times are those of emulated nodes and compare only with each other.

The page is written by ` + "`make test-faults`" + `, which ends with an error if anything is left. [development.md](development.md) says
how to run a part of it.

`

// markdown is the report as a page.
func (r *report) markdown() string {
	var b strings.Builder
	b.WriteString(header)
	fmt.Fprintf(&b, "Machine class: emulated lab (QEMU, mostly without KVM). Begun on %s, with Kubernetes %s and containerd %s.\n", r.file.Started, r.file.Kubernetes, r.file.Containerd)
	for _, g := range groups {
		var names []string
		for name, l := range r.file.Lines {
			if l.Group == g.name {
				names = append(names, name)
			}
		}
		if len(names) == 0 {
			continue
		}
		order := map[string]int{}
		for i, j := range allJobs() {
			order[j.name()] = i
		}
		slices.SortFunc(names, func(a, b string) int { return cmp.Or(order[a]-order[b], strings.Compare(a, b)) })
		fmt.Fprintf(&b, "\n## %s\n\n", g.title)
		if g.says != "" {
			b.WriteString(g.says + "\n\n")
		}
		b.WriteString("| Fault | Rounds | Repaired | Seconds | Left |\n|---|---|---|---|---|\n")
		var notes []string
		for _, name := range names {
			l := r.file.Lines[name]
			fmt.Fprintf(&b, "| %s | %d | %d | %s | %s |\n", l.title(), len(l.Rounds), l.repaired(), l.times(), l.left())
			for _, round := range l.Rounds {
				for _, n := range round.Notes {
					if n = "- " + l.title() + ": " + n; !slices.Contains(notes, n) && g.notes {
						notes = append(notes, n)
					}
				}
			}
		}
		if len(notes) > 0 {
			fmt.Fprintf(&b, "\n%s\n", strings.Join(notes, "\n"))
		}
	}
	b.WriteString(r.containersText())
	b.WriteString(r.missingText())
	b.WriteString("\n## Covered by end-to-end tests\n\n| Fault | Test of test/e2e |\n|---|---|\n")
	for _, c := range covered {
		fmt.Fprintf(&b, "| %s | %s |\n", c.fault, c.test)
	}
	b.WriteString("\n## Not tried\n\n| Fault | Why |\n|---|---|\n")
	for _, n := range notTried {
		fmt.Fprintf(&b, "| %s | %s |\n", n.fault, n.why)
	}
	return b.String()
}

// promises are what holds for containers, in the order of the page.
var promises = []struct{ kind, says, holds string }{
	{"plain app", "lists the claim", "does not start without the device, with the agent up, away, hung or cut off from the runtime"},
	{"sidecar side", "sidecar container that lists the claim", "the same"},
	{"sidecar app", "lists the claim, after a sidecar", "the same"},
	{"once init", "init container that lists the claim, `restartPolicy: Never`", "the same; being held back does not end the pod"},
	{"once app", "lists the claim, `restartPolicy: Never`", "the same; being held back does not end the pod"},
	{"unlisted app", "does not list the claim", "held back while the agent is there; without the agent it starts, and gets the device when the agent is back"},
}

// containersText says what was seen of each kind of container in all rounds.
func (r *report) containersText() string {
	all := containers{}
	for _, l := range r.file.Lines {
		for _, round := range l.Rounds {
			for kind, s := range round.Containers {
				all[kind] = starts{all[kind].All + s.All, all[kind].Bare + s.Bare}
			}
		}
	}
	var b strings.Builder
	b.WriteString("\n## What containers saw\n\nThe first instruction of each container writes down which interfaces there are.\n\n" +
		"| Container | Started | Without the device | What holds |\n|---|---|---|---|\n")
	for _, p := range promises {
		fmt.Fprintf(&b, "| %s | %d | %d | %s |\n", p.says, all[p.kind].All, all[p.kind].Bare, p.holds)
	}
	return b.String()
}

func (l *line) title() string {
	if l.Says != "" {
		return l.Says + ": " + l.Fault
	}
	return l.Fault
}

func (l *line) repaired() int {
	n := 0
	for _, r := range l.Rounds {
		if r.Left == "" {
			n++
		}
	}
	return n
}

func (l *line) times() string {
	var seconds []float64
	for _, r := range l.Rounds {
		if r.Left == "" {
			seconds = append(seconds, r.Seconds)
		}
	}
	if len(seconds) == 0 {
		return "-"
	}
	slices.Sort(seconds)
	if len(seconds) == 1 {
		return fmt.Sprintf("%.0f", seconds[0])
	}
	return fmt.Sprintf("%.0f / %.0f / %.0f", seconds[0], seconds[len(seconds)/2], seconds[len(seconds)-1])
}

// missingText says what of the whole form this report does not have.
func (r *report) missingText() string {
	fewer, none := 0, ""
	for _, j := range allJobs() {
		switch l := r.file.Lines[j.name()]; {
		case l == nil:
			none += fmt.Sprintf("- %s\n", (&line{Fault: j.fault, Says: j.says}).title())
		case len(l.Rounds) < j.rounds:
			fewer++
		}
	}
	if fewer == 0 && none == "" {
		return "\nThis is the whole form, with all of its rounds.\n"
	}
	text := fmt.Sprintf("\n## Missing in this report\n\n%d faults above have fewer rounds than the whole form has.", fewer)
	if none != "" {
		text += " Those without any:\n\n" + none
	}
	return strings.TrimRight(text, "\n") + "\n"
}

// leftLength is how much of what was left the page says; the rest is with the logs.
const leftLength = 300

func (l *line) left() string {
	for _, r := range l.Rounds {
		if r.Left != "" {
			return summary(r.Left)
		}
	}
	return "nothing"
}

// summary is what was left in one line: of a comparison what differs.
func summary(left string) string {
	lines := strings.Split(left, "\n")
	parts := lines[:1]
	for _, line := range lines[1:] {
		if strings.HasPrefix(line, "-") || strings.HasPrefix(line, "+") || strings.Contains(line, "STARTED") || strings.Contains(line, "LEFT") {
			parts = append(parts, strings.Join(strings.Fields(line), " "))
		}
	}
	text := strings.NewReplacer("|", "/", "nodestate.Snapshot{", "", "\u00a0", " ").Replace(strings.Join(parts, " "))
	if len(text) > leftLength {
		text = strings.ToValidUTF8(text[:leftLength], "") + " ..."
	}
	return text
}
