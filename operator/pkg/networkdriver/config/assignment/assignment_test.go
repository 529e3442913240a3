// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package assignment

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/labels"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// conf is a config created so many seconds after the epoch.
func conf(t testing.TB, name string, second int, selector string) Config {
	t.Helper()
	s, err := labels.Parse(selector)
	require.NoError(t, err)
	return Config{Name: name, Created: epoch.Add(time.Duration(second) * time.Second), Selector: s}
}

// resolve returns what changed, sorted.
func resolve(a *Assignment) Changes {
	changes := a.Resolve()
	slices.Sort(changes.Nodes)
	slices.Sort(changes.Configs)
	return changes
}

func TestOneConfig(t *testing.T) {
	a := New()
	a.SetNode("n1", map[string]string{"role": "sriov"})
	a.SetNode("n2", map[string]string{"role": "other"})
	require.Empty(t, resolve(a).Nodes, "without a config no node has an owner, as before")
	a.SetConfig(conf(t, "a", 0, "role=sriov"))
	require.Equal(t, Changes{Nodes: []string{"n1"}, Configs: []string{"a"}}, resolve(a))
	require.Equal(t, "a", a.Owner("n1"))
	require.Empty(t, a.Owner("n2"))
	require.Equal(t, Verdict{Matched: 1}, a.Verdict("a"))

	a.SetNode("n2", map[string]string{"role": "sriov"})
	a.SetNode("n1", map[string]string{"role": "sriov", "zone": "1"})
	require.Equal(t, Changes{Nodes: []string{"n2"}, Configs: []string{"a"}}, resolve(a), "n1's change does not matter")
	a.SetConfig(conf(t, "a", 0, "role=sriov"))
	require.Empty(t, resolve(a).Nodes, "the same again")
	a.SetConfig(conf(t, "a", 0, "zone=1"))
	require.Equal(t, []string{"n2"}, resolve(a).Nodes, "the selector moved")
	require.Empty(t, a.Owner("n2"))
	set, ok := a.Labels("n1")
	require.True(t, ok)
	require.Equal(t, labels.Set{"role": "sriov", "zone": "1"}, set)
	a.DeleteNode("n1")
	_, ok = a.Labels("n1")
	require.False(t, ok, "before Resolve")
	require.Equal(t, []string{"n1"}, resolve(a).Nodes)
	_, ok = a.Labels("n1")
	require.False(t, ok)
	require.Equal(t, Verdict{}, a.Verdict("a"))
	a.DeleteConfig("a")
	a.DeleteConfig("a")
	a.DeleteNode("n1")
	require.Empty(t, resolve(a).Nodes)
}

func TestPriority(t *testing.T) {
	for _, order := range [][]string{{"a", "b", "c"}, {"c", "b", "a"}, {"b", "c", "a"}} {
		a := New()
		a.SetNode("n", nil)
		configs := map[string]Config{"a": conf(t, "a", 7, ""), "b": conf(t, "b", 5, ""), "c": conf(t, "c", 5, "")}
		for _, name := range order {
			a.SetConfig(configs[name])
			a.Resolve()
		}
		require.Equal(t, "b", a.Owner("n"), "older before the name, name before the order of arrival")
		require.Equal(t, Verdict{Matched: 1, Winner: "b", Contested: 1, Sample: []string{"n"}}, a.Verdict("a"))
		require.Equal(t, "b", a.Verdict("c").Winner)
		// A config that is deleted and made again comes last.
		a.SetConfig(conf(t, "b", 9, ""))
		a.Resolve()
		require.Equal(t, "c", a.Owner("n"))
		require.Equal(t, "c", a.Verdict("b").Winner)
	}
}

// TestWhole: one contested node is enough for the younger config to lose all of its nodes.
func TestWhole(t *testing.T) {
	a := New()
	for i := range 6 {
		a.SetNode(fmt.Sprint("n", i), map[string]string{"a": fmt.Sprint(i < 4), "b": fmt.Sprint(i >= 2)})
	}
	a.SetConfig(conf(t, "old", 0, "a=true"))
	a.SetConfig(conf(t, "young", 1, "b=true"))
	require.Equal(t, []string{"n0", "n1", "n2", "n3"}, resolve(a).Nodes)
	require.Equal(t, Verdict{Matched: 4}, a.Verdict("old"))
	require.Equal(t, Verdict{Matched: 4, Winner: "old", Contested: 2, Sample: []string{"n2", "n3"}}, a.Verdict("young"))
	require.Empty(t, a.Owner("n4"))

	a.DeleteNode("n2")
	require.Equal(t, Changes{Nodes: []string{"n2"}, Configs: []string{"old", "young"}}, resolve(a))
	require.Equal(t, Verdict{Matched: 3, Winner: "old", Contested: 1, Sample: []string{"n3"}}, a.Verdict("young"))
	a.SetNode("n3", map[string]string{"a": "true"})
	require.Equal(t, []string{"n4", "n5"}, resolve(a).Nodes, "no overlap any more")
	require.Equal(t, Verdict{Matched: 2}, a.Verdict("young"))
	nodes := []string{}
	a.Nodes("young", func(name string) { nodes = append(nodes, name) })
	require.ElementsMatch(t, []string{"n4", "n5"}, nodes)
}

// TestChain: A hides B, B hid C. Without A, B is back and C is hidden.
func TestChain(t *testing.T) {
	a := New()
	a.SetNode("n1", map[string]string{"a": "", "b": ""})
	a.SetNode("n2", map[string]string{"b": "", "c": ""})
	a.SetNode("n3", map[string]string{"c": ""})
	a.SetConfig(conf(t, "B", 1, "b"))
	a.SetConfig(conf(t, "C", 2, "c"))
	a.Resolve()
	require.Equal(t, "B", a.Verdict("C").Winner)
	a.SetConfig(conf(t, "A", 0, "a"))
	require.Equal(t, Changes{Nodes: []string{"n1", "n2", "n3"}, Configs: []string{"A", "B", "C"}}, resolve(a))
	require.Equal(t, []string{"A", "C", "C"}, []string{a.Owner("n1"), a.Owner("n2"), a.Owner("n3")})
	require.Equal(t, "A", a.Verdict("B").Winner)
	require.Empty(t, a.Verdict("C").Winner)
	a.DeleteConfig("A")
	require.Equal(t, Changes{Nodes: []string{"n1", "n2", "n3"}, Configs: []string{"A", "B", "C"}}, resolve(a))
	require.Equal(t, []string{"B", "B", ""}, []string{a.Owner("n1"), a.Owner("n2"), a.Owner("n3")})
}

// TestNodeComesBack: of a node that was deleted and made again between two calls counts what it is at the end.
func TestNodeComesBack(t *testing.T) {
	a := New()
	a.SetConfig(conf(t, "a", 0, "a"))
	a.SetNode("n", map[string]string{"a": ""})
	a.Resolve()
	a.DeleteNode("n")
	a.SetNode("n", map[string]string{"a": ""})
	require.Empty(t, resolve(a).Nodes)
	require.Equal(t, "a", a.Owner("n"))
	a.DeleteNode("n")
	a.SetNode("n", nil)
	require.Equal(t, []string{"n"}, resolve(a).Nodes)
	require.Empty(t, a.Owner("n"))
}

// reference is the rule as it reads, without anything incremental.
func reference(nodes map[string]map[string]string, configs []Config) (owners map[string]string, winners map[string]string) {
	owners, winners = map[string]string{}, map[string]string{}
	configs = slices.SortedFunc(slices.Values(configs), Config.before)
	rank := map[string]int{}
	for i, c := range configs {
		rank[c.Name] = i
		var matched []string
		winner := ""
		for name, set := range nodes {
			if !c.Selector.Matches(labels.Set(set)) {
				continue
			}
			matched = append(matched, name)
			if o := owners[name]; o != "" && (winner == "" || rank[o] < rank[winner]) {
				winner = o
			}
		}
		if winner != "" {
			winners[c.Name] = winner
			continue
		}
		for _, name := range matched {
			owners[name] = c.Name
		}
	}
	return owners, winners
}

// TestAgainstReference takes random events through both, and checks that each change was told of.
func TestAgainstReference(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		a := New()
		nodes, configs := map[string]map[string]string{}, map[string]Config{}
		told := map[string]string{}
		verdicts := map[string]Verdict{}
		for range 150 {
			for range 1 + r.IntN(3) {
				node, name := fmt.Sprint("n", r.IntN(12)), fmt.Sprint("c", r.IntN(90))
				switch r.IntN(6) {
				case 0:
					delete(nodes, node)
					a.DeleteNode(node)
				case 1, 2, 3:
					set := map[string]string{}
					for range r.IntN(4) {
						set[fmt.Sprint("l", r.IntN(8))] = fmt.Sprint(r.IntN(2))
					}
					nodes[node] = set
					a.SetNode(node, set)
				case 4:
					delete(configs, name)
					a.DeleteConfig(name)
				case 5:
					configs[name] = conf(t, name, r.IntN(5), fmt.Sprintf("l%d=%d", r.IntN(8), r.IntN(2)))
					a.SetConfig(configs[name])
				}
			}
			changes := a.Resolve()
			for _, name := range changes.Nodes {
				told[name] = a.Owner(name)
				if told[name] == "" {
					delete(told, name)
				}
			}
			for _, name := range changes.Configs {
				verdicts[name] = a.Verdict(name)
			}
			owners, winners := reference(nodes, slices.Collect(maps.Values(configs)))
			require.Equal(t, owners, told, "seed %d", seed)
			governed := 0
			for name := range configs {
				v := a.Verdict(name)
				require.Equal(t, v, verdicts[name], "seed %d: a verdict that changed and was not told of", seed)
				require.Equal(t, winners[name], v.Winner)
				a.Nodes(name, func(node string) {
					governed++
					require.Equal(t, name, owners[node])
				})
			}
			require.Equal(t, len(owners), governed)
		}
	}
}
