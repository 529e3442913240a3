// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package wires

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

type pools = map[string][]string

// TestBetween says by which ports pools reach each other, over other pools and nodes too, and nothing of those that do not.
func TestBetween(t *testing.T) {
	table := NewTable()
	between := func(a, b string) string { return table.Between([]string{a}, []string{b}) }
	require.Empty(t, between("a", "b"))

	require.True(t, table.Set("n1", pools{"a": {"eth0", "eth1"}, "b": {"eth1"}, "alone": {"eth2"}, "dummies": nil}))
	require.Equal(t, "pools a and b have devices of PF eth1 on node n1", between("a", "b"))
	require.Equal(t, "pools b and a have devices of PF eth1 on node n1", between("b", "a"))
	require.Empty(t, between("a", "alone"), "ports of their own")
	require.Empty(t, between("alone", "dummies"))
	require.Empty(t, between("a", "nowhere"))

	// The port is another one on another node, though it has the same name.
	require.False(t, table.Set("n2", pools{"c": {"eth1"}}))
	require.Empty(t, between("b", "c"))
	// A pool is one wire wherever it is.
	require.True(t, table.Set("n2", pools{"c": {"eth7"}, "a": {"eth7"}}))
	require.Equal(t, "pools b and a have devices of PF eth1 on node n1, pools a and c have devices of PF eth7 on node n2", between("b", "c"))
	require.True(t, table.Set("n0", pools{"c": {"eth7"}, "d": {"eth7"}, "b": {"eth7"}}))
	require.Equal(t, "pools b and c have devices of PF eth7 on node n0", between("b", "c"), "the shortest way")
	require.Equal(t, "pools b and d have devices of PF eth7 on node n0", table.Between([]string{"alone", "b"}, []string{"dummies", "d"}))

	require.True(t, table.Set("n0", nil))
	require.True(t, table.Set("n1", nil))
	require.Empty(t, between("b", "c"))
	require.True(t, table.Set("n2", nil))
	require.Equal(t, NewTable(), &Table{ofNode: table.ofNode, sharing: table.sharing}, "nothing is left")
	require.Empty(t, table.links)
}

// TestSetIsQuiet tells of a change only where an answer is another one: of many nodes of one kind few are news.
func TestSetIsQuiet(t *testing.T) {
	table, told := NewTable(), 0
	nodes := rand.New(rand.NewPCG(1, 2)).Perm(5000)
	for range 2 {
		for _, n := range nodes {
			if table.Set(fmt.Sprintf("n%04d", n), pools{"a": {"eth0"}, "b": {"eth0", "eth1"}, "c": {"eth1"}}) {
				told++
			}
		}
	}
	require.Less(t, told, 50)
	require.Equal(t, "pools a and b have devices of PF eth0 on node n0000, pools b and c have devices of PF eth1 on node n0000",
		table.Between([]string{"a"}, []string{"c"}))
	require.False(t, table.Set("n4999", nil))
	require.True(t, table.Set("n0000", nil), "another node is the example")
	require.Contains(t, table.Between([]string{"a"}, []string{"b"}), "node n0001")
}
