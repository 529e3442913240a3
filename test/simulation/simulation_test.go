// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package simulation

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
)

const (
	// seedEnv runs one seed alone and prints its whole trace, stepsEnv runs so many steps in all.
	seedEnv  = "NETWORKDRIVER_SIMULATION_SEED"
	stepsEnv = "NETWORKDRIVER_SIMULATION_STEPS"

	defaultSteps = 100_000
	// mutantSteps are those in which a mutant has to be found. Some need a rare order of events.
	mutantSteps = 1_000_000
	// chaosSteps are those of a seed before its faults stop.
	chaosSteps = 3000
	vfCount    = 5
	maxPods    = 7
	otherNodes = 2
	// restTime is how long the world may be at rest until nothing is owed any more. That is looked at in intervals, and has to
	// hold for some looks.
	restTime      = 25 * time.Minute
	cleanInterval = 15 * time.Second
	cleanLooks    = 8
	// lastLines are shown of the trace of a seed that fails.
	lastLines = 150
)

func hasUID(uid kubetypes.UID) func(resourceapi.ResourceClaimConsumerReference) bool {
	return func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == uid }
}

// result is what became of a seed.
type result struct {
	seed    uint64
	steps   int
	failure string
	trace   []string
	// recovery is the time from the end of the faults until nothing was owed any more.
	recovery time.Duration
}

func TestSimulation(t *testing.T) {
	if seed := os.Getenv(seedEnv); seed != "" {
		n, err := strconv.ParseUint(seed, 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", seedEnv, err)
		}
		r := simulate(t, n, mutant{})
		t.Log(r.log(len(r.trace)))
		r.report(t)
		return
	}
	wanted := defaultSteps
	if steps := os.Getenv(stepsEnv); steps != "" {
		n, err := strconv.Atoi(steps)
		if err != nil {
			t.Fatalf("%s: %v", stepsEnv, err)
		}
		wanted = n
	}
	steps, seeds, slowest := 0, 0, time.Duration(0)
	for seed := uint64(1); steps < wanted && !t.Failed(); seed++ {
		r := simulate(t, seed, mutant{})
		r.report(t)
		steps, seeds, slowest = steps+r.steps, seeds+1, max(slowest, r.recovery)
	}
	t.Logf("%d steps of %d seeds; after the faults it took %s at the longest until everything was as it should be", steps, seeds, slowest)
}

// report fails the test if the seed did.
func (r result) report(t *testing.T) {
	t.Helper()
	if r.failure != "" {
		t.Errorf("%s\nseed %d after %d steps: %s\nalone: %s=%d, or make test-simulation SEED=%d", r.log(lastLines), r.seed, r.steps, r.failure, seedEnv,
			r.seed, r.seed)
	}
}

// log is the end of the trace.
func (r result) log(lines int) string {
	return "\n" + strings.Join(r.trace[max(0, len(r.trace)-lines):], "\n")
}

// TestReplay: a seed does again what it has done.
func TestReplay(t *testing.T) {
	for seed := uint64(1); seed <= 3; seed++ {
		first, second := simulate(t, seed, mutant{}), simulate(t, seed, mutant{})
		for i, line := range first.trace {
			if i >= len(second.trace) || line != second.trace[i] {
				t.Errorf("seed %d: line %d is\n%s\nand the second time\n%s", seed, i, line, second.trace[min(i, len(second.trace)-1)])
				break
			}
		}
	}
}

// TestMutants: what the driver needs is missed when it is taken away.
func TestMutants(t *testing.T) {
	for name, m := range map[string]mutant{
		"fault 1, no gate":                          {noCDI: true, noHook: true, admitAll: true},
		"fault 1, nobody passes on":                 {noHandOver: true},
		"fault 2, nobody asks the kernel":           {blind: true},
		"fault 4, a journal that forgets":           {forgetful: true},
		"a claim that is owed nothing":              {oweNothing: true},
		"a device taken out of a sandbox that runs": {freeInUse: true},
		"whatever link there is":                    {anyLink: true},
		"no hook before a container":                {noHook: true},
		"an address that is taken is ours":          {takeTaken: true},
		"an address is returned before the link":    {returnFirst: true},
		"the journal after the address":             {noteLate: true},
		"nobody looks for addresses that are left":  {keepAll: true},
		"devices that are not described":            {undescribed: true},
		"descriptions that are left":                {keepFiles: true},
		"a driver that stays bound":                 {keepDriver: true},
		"an address that stays fixed":               {keepMAC: true},
		"a group that is the former one":            {oldGroup: true},
		"gates that stay open":                      {openGates: true},
		"a group that is another one's":             {noGroups: true},
	} {
		t.Run(name, func(t *testing.T) {
			steps := 0
			for seed := uint64(1); steps < mutantSteps; seed++ {
				r := simulate(t, seed, m)
				steps += r.steps
				if r.failure != "" {
					t.Logf("found by seed %d at its step %d, %d in all: %s", seed, r.steps, steps, r.failure)
					return
				}
			}
			t.Errorf("not found in %d steps", steps)
		})
	}
}

// stateDir is on memory where there is some: the journal is durable, and there are thousands of entries.
func stateDir(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "simulation-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// newSim makes a node at rest.
func newSim(seed uint64, dir string, m mutant) *sim {
	s := &sim{
		seed: seed, rng: rand.New(rand.NewPCG(seed, 0)), start: time.Now(), wake: make(chan struct{}, 1),
		world: newProcess("world"), dir: dir, mutant: m, bootID: "boot-1",
	}
	s.kernel = newKernel(s, vfCount)
	s.api = newAPIServer(s)
	s.runtime = &containerRuntime{sim: s, process: newProcess("runtime")}
	return s
}

// simulate runs a seed: faults for some thousand steps, then rest, and then the end of all pods.
func simulate(t *testing.T, seed uint64, m mutant) (r result) {
	// Where several goroutines can run it is Go's choice which does, by what else there is to do.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	runtime.GC()
	dir := filepath.Join(stateDir(t), strconv.FormatUint(seed, 10))
	synctest.Test(t, func(t *testing.T) {
		s := newSim(seed, dir, m)
		s.begin()
		s.run(func() bool { return s.steps >= chaosSteps })
		s.rest()
		recovery := s.settled("while pods run")
		s.endAll()
		s.settled("after all pods have ended")
		s.shutdown()
		r = result{seed, s.steps, s.failure, s.trace, recovery}
	})
	return r
}

// begin starts all processes and the workload.
func (s *sim) begin() {
	s.startAgent()
	s.startKubelet(map[kubetypes.UID]*claimInfo{})
	go s.controlPlane()
	go s.workload()
	for i := range otherNodes {
		n := newOtherNode(s, fmt.Sprint("node", i+2))
		s.others = append(s.others, n)
		n.start()
	}
	go s.chaos()
}

// settled lets time pass until nothing is owed, and is not for a while. It returns how long it took.
func (s *sim) settled(when string) (took time.Duration) {
	begin := time.Now()
	for clean := 0; clean < cleanLooks && s.failure == ""; {
		next := time.Now().Add(cleanInterval)
		s.run(func() bool { return !time.Now().Before(next) })
		owed := s.owed()
		switch {
		case len(owed) == 0:
			clean++
		case time.Since(begin) > restTime:
			s.fail("owed for ever, %s:\n  %s", when, strings.Join(owed, "\n  "))
		default:
			clean, took = 0, time.Since(begin)
		}
	}
	return took
}

// endAll deletes all pods.
func (s *sim) endAll() {
	for _, p := range s.api.sortedPods() {
		s.api.delete(p, false)
	}
}

// shutdown ends all goroutines.
func (s *sim) shutdown() {
	processes := []*process{s.kubelet.process, s.runtime.process, s.world}
	if s.agent != nil {
		processes = append(processes, s.agent.process)
	}
	for _, n := range s.others {
		if n.agent != nil {
			processes = append(processes, n.agent)
		}
	}
	s.condemn(processes...)
	for _, p := range processes {
		p.cancel()
	}
	for range 100 {
		synctest.Wait()
		s.admit()
	}
	time.Sleep(time.Hour) // timers of the driver's libraries
}
