// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// crashEnv sets the size of TestKilledAnywhere as NICs x rounds, such as 50x20.
const crashEnv = "NETWORKDRIVER_CRASH"

// station is one NIC with its pod, which are used again in each round.
type station struct {
	*bed
	pod  *space
	conf string
	id   string
}

func (s *station) call(verb string) rawCall {
	return rawCall{verb: verb, containerID: s.id, ifName: "net1", netns: s.pod.path, conf: s.conf}
}

// tally counts what kills have hit.
type tally struct {
	mu     sync.Mutex // guards what follows
	killed map[string]int
	moved  int // NICs that were away from home when ADD was killed
	took   map[string][]time.Duration
}

func newTally() *tally { return &tally{killed: map[string]int{}, took: map[string][]time.Duration{}} }

// usual is how long a call takes that is not killed.
func (c *tally) usual(verb string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.took[verb]) == 0 {
		return 100 * time.Millisecond
	}
	sorted := slices.Sorted(slices.Values(c.took[verb]))
	return sorted[len(sorted)/2]
}

// run calls the plugin, kills it at some moment if told to, and says whether it ended well.
func (s *station) run(t *testing.T, verb string, kill bool, c *tally) (ok bool, output string) {
	t.Helper()
	var out bytes.Buffer
	var cmd *exec.Cmd
	started := time.Now()
	err := s.host.try(func() error {
		cmd = s.command(s.call(verb))
		cmd.Stdout, cmd.Stderr = &out, &out
		return cmd.Start()
	})
	require.NoError(t, err)
	if kill {
		timer := time.AfterFunc(time.Duration(rand.Int64N(int64(c.usual(verb)))), func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
	}
	err = cmd.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() {
		c.killed[verb]++
	} else if err == nil {
		c.took[verb] = append(c.took[verb], time.Since(started))
	}
	return err == nil, out.String()
}

// Pods come and go on many NICs at once while the plugin is killed at any moment; its sub-plugins go on. Whatever DEL
// or GC find then, the host is as it was in the end, each time.
func TestKilledAnywhere(t *testing.T) {
	t.Parallel()
	nics, rounds := 6, 3
	if size := os.Getenv(crashEnv); size != "" {
		_, err := fmt.Sscanf(size, "%dx%d", &nics, &rounds)
		require.NoError(t, err, "%s is NICs x rounds, such as 50x20", crashEnv)
	}
	b := newBed(t)
	stations := make([]*station, nics)
	for i := range stations {
		name := fmt.Sprintf("fab%d", i)
		b.host.veth(name, b.leaf, "p"+name)
		b.host.address(name, fmt.Sprintf("10.1.%d.130/25", i), fmt.Sprintf("10.2.%d.5/31", i), fmt.Sprintf("2001:db8:%d::5/64", i))
		s := &station{bed: b, pod: newSpace(t), id: fmt.Sprintf("pod%d", i)}
		s.conf = strings.Replace(b.single(routeFields(1, 16)), `"eth1"`, fmt.Sprintf("%q", name), 1)
		stations[i] = s
	}
	before := b.host.snapshot()
	counts := newTally()
	for round := range rounds {
		var wg sync.WaitGroup
		for i, s := range stations {
			wg.Go(func() {
				// Most are killed; some live through a round, and are killed when they end.
				killAdd := round > 0 && rand.IntN(4) > 0
				ok, out := s.run(t, "ADD", killAdd, counts)
				if !killAdd && !ok {
					t.Errorf("round %d: ADD of %s: %s", round, s.id, out)
				}
				if !ok && !b.host.linkExists(fmt.Sprintf("fab%d", i)) {
					counts.mu.Lock()
					counts.moved++
					counts.mu.Unlock()
				}
				for attempt := range 3 {
					if ok, out := s.run(t, "DEL", attempt < 2, counts); ok {
						break
					} else if attempt == 2 {
						t.Errorf("round %d: DEL of %s: %s", round, s.id, out)
					}
					if rand.IntN(3) == 0 {
						break // GC finds it
					}
				}
			})
		}
		wg.Wait()
		_, stderr, failure := b.run(rawCall{verb: "GC", conf: b.single(`"cni.dev/valid-attachments": []`)})
		require.Nil(t, failure, "round %d: GC: %v\n%s", round, failure, stderr)
		require.Equal(t, before, b.host.snapshot(), "round %d", round)
		for _, s := range stations {
			links, err := s.pod.LinkList()
			require.NoError(t, err)
			require.Len(t, links, 1, "round %d: %s has more than lo", round, s.id)
		}
		for _, name := range b.recorded() {
			require.True(t, strings.HasSuffix(name, ".tmp"), "round %d: record %s is left", round, name)
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%d NICs, %d rounds: killed %v, with the NIC away from home %d times; ADD takes %v, DEL %v", nics, rounds, counts.killed,
		counts.moved, counts.usual("ADD"), counts.usual("DEL"))
	require.NotZero(t, counts.killed["ADD"]+counts.killed["DEL"])
}

// linkExists is asked while others work.
func (s *space) linkExists(name string) bool {
	_, err := s.LinkByName(name)
	return err == nil
}

// Many calls for few NICs at once: each NIC has one owner at a time, none is lost, and no record either.
func TestManyForFew(t *testing.T) {
	t.Parallel()
	const nics, pods, turns = 3, 8, 2
	b := newBed(t)
	for i := range nics {
		name := fmt.Sprintf("fab%d", i)
		b.host.veth(name, b.leaf, "p"+name)
		b.host.address(name, fmt.Sprintf("10.1.%d.130/25", i))
	}
	before := b.host.snapshot()
	var spaces []*space
	for range pods {
		spaces = append(spaces, newSpace(t))
	}
	var wg sync.WaitGroup
	var mu sync.Mutex // guards wins
	wins := 0
	for i := range pods {
		wg.Go(func() {
			for range turns {
				s := &station{bed: b, pod: spaces[i], id: fmt.Sprintf("pod%d", i)}
				s.conf = strings.Replace(b.single(), `"eth1"`, fmt.Sprintf("%q", fmt.Sprintf("fab%d", i%nics)), 1)
				counts := newTally()
				if ok, out := s.run(t, "ADD", false, counts); ok {
					mu.Lock()
					wins++
					mu.Unlock()
				} else if !strings.Contains(out, "no such NIC") {
					t.Errorf("ADD of %s: %s", s.id, out)
				}
				if ok, out := s.run(t, "DEL", false, counts); !ok {
					t.Errorf("DEL of %s: %s", s.id, out)
				}
			}
		})
	}
	wg.Wait()
	require.NotZero(t, wins)
	b.requireHome(before)
}
