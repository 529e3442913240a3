// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// group is a part of the report.
type group struct {
	name, title, says string
	// notes says that the rounds' notes are shown.
	notes bool
}

var groups = []group{
	{"agent", "The agent ends, stops or is deleted", "Kubelet goes on meanwhile. The move into a pod, the name there and the link's way up are one request to the kernel.", true},
	{"runtime", "The container runtime and kubelet", "", true},
	{"api", "The API server", "", true},
	{"objects", "Pods and claims", "", true},
	{"nic", "The NIC", "A VF that is made anew has another address, which is no deviation.", true},
	{"node", "The node", "A VF has another address after a boot, which is no deviation.", true},
	{"load", "Many at once", "", true},
	{versions, "Another kubelet", "", true},
}

// versions is the group of what was tried with another version of Kubernetes.
const versions = "versions"

// allJobs returns everything that can be tried.
func allJobs() []job { return append(matrix(), scenarios()...) }

// scenarios are the faults around the agent.
func scenarios() []job {
	return []job{
		{group: "runtime", fault: "containerd killed", says: "under pods", rounds: 5, short: 1, run: underPods((*bench).killContainerd)},
		{group: "runtime", fault: "containerd killed", says: "while pods start", rounds: 5, run: whilePodsStart((*bench).killContainerd)},
		{group: "runtime", fault: "containerd killed", says: "while pods end", rounds: 5, run: whilePodsEnd((*bench).killContainerd)},
		{group: "runtime", fault: "containerd away for 15 s", says: "while pods start", rounds: 3, run: whilePodsStart((*bench).containerdAway)},
		{group: "runtime", fault: "containerd back with NRI off", says: "while pods start", rounds: 3, run: withoutNRI},
		{group: "runtime", fault: "kubelet restarted 20 times", says: "a second pod waits for the claim", rounds: 1, run: secondPodWaits(20, (*bench).restartKubelet)},
		{group: "runtime", fault: "kubelet restarted 20 times", says: "under pods", rounds: 1, run: underPods(func(b *bench, ctx context.Context) error {
			return b.again(ctx, 20, b.restartKubelet)
		})},
		{group: "runtime", fault: "kubelet restarted", says: "a second pod waits for the claim", rounds: 3, run: secondPodWaits(1, (*bench).restartKubelet)},
		{group: "runtime", fault: "containerd killed", says: "a second pod waits for the claim", rounds: 3, run: secondPodWaits(1, (*bench).killContainerd)},
		{group: "runtime", fault: "kubelet restarted", says: "while pods start", rounds: 3, run: whilePodsStart((*bench).restartKubelet)},
		{group: "runtime", fault: "kubelet restarted", says: "while pods end", rounds: 3, run: whilePodsEnd((*bench).restartKubelet)},
		{group: "runtime", fault: "kubelet's checkpoint lost", says: "under pods", rounds: 3, run: checkpointLost},
		{group: "runtime", fault: "registration folder emptied for 5 min", says: "under pods", rounds: 1, run: registrationEmptied(5 * time.Minute)},
		{group: "runtime", fault: "registration folder emptied for 20 s", says: "under pods", rounds: 2, run: registrationEmptied(20 * time.Second)},
		{group: "runtime", fault: "registration folder full", says: "at the agent's start", rounds: 2, run: registrationFull},
		{group: "runtime", fault: "pause killed", says: "agent up", rounds: 3, run: sandboxAnew(false)},
		{group: "runtime", fault: "pause killed", says: "agent away", rounds: 3, run: sandboxAnew(true)},
		{group: "runtime", fault: "pods' namespaces gone first", says: "agent up", rounds: 3, run: namespaceGone},
		{group: "runtime", fault: "CDI folder wiped", says: "under pods", rounds: 3, run: cdiWiped},
		{group: "runtime", fault: "CDI folder full", says: "while pods start", rounds: 3, run: cdiFull},

		{group: "api", fault: "API server and etcd away for 60 s", says: "under pods", as: alone, rounds: 1, run: apiAway(60*time.Second, false)},
		{group: "api", fault: "API server and etcd away for 60 s", says: "at the agent's start", as: alone, rounds: 1, run: apiAway(60*time.Second, true)},
		{group: "api", fault: "API server away for 10 s", says: "while pods end", as: alone, rounds: 2, run: apiAwayWhilePodsEnd},

		{group: "objects", fault: "pods deleted by force", says: "agent up", rounds: 5, short: 1, run: forcedDeletion(false, 0)},
		{group: "objects", fault: "pods deleted by force", says: "agent away", rounds: 5, run: forcedDeletion(true, 0)},
		{group: "objects", fault: "pods deleted", says: "agent away", rounds: 3, run: forcedDeletion(true, 1)},
		{group: "objects", fault: "claims deleted by force", says: "agent up", rounds: 3, run: claimsDeleted(false)},
		{group: "objects", fault: "claims deleted by force", says: "agent away", rounds: 3, run: claimsDeleted(true)},
		{group: "objects", fault: "claim allotted another device under the same UID", says: "kubelet away", rounds: 3, run: reallocated},
		{group: "objects", fault: "claim allotted on another node under the same UID", says: "kubelet away", as: alone, two: true, rounds: 3, run: reallocatedElsewhere},
		{group: "objects", fault: "journal and records of a later version, and back", says: "agent away", rounds: 2, run: laterVersion},
		{group: "objects", fault: "two agents", says: "under pods", rounds: 3, run: twoAgents},

		{group: "objects", fault: "another DRA driver fails for 10 min", says: "pod with both", rounds: 1, run: otherFails(10 * time.Minute)},
		{group: "objects", fault: "another DRA driver fails for 30 s", says: "pod with both", rounds: 2, run: otherFails(30 * time.Second)},

		{group: "nic", fault: "VF unbound and bound", says: "under a pod", rounds: 3, run: rebound},
		{group: "nic", fault: "sriov_numvfs 0 and back", says: "under pods", rounds: 3, run: vfsAnew(false)},
		{group: "nic", fault: "sriov_numvfs 0 and back", says: "agent away", rounds: 3, run: vfsAnew(true)},
		{group: "nic", fault: "PF down and up", says: "before pods start", rounds: 3, run: pfDown("before")},
		{group: "nic", fault: "PF down and up", says: "while pods start", rounds: 3, run: pfDown("between")},
		{group: "nic", fault: "PF down and up", says: "under pods", rounds: 3, run: pfDown("under")},
		{group: "nic", fault: "PF renamed and back", says: "under pods", rounds: 3, run: pfRenamed},
		{group: "nic", fault: "PF in another namespace and back", says: "under pods", rounds: 3, run: pfElsewhere},
		{group: "nic", fault: "NIC unplugged and back", says: "under pods", rounds: 2, run: unplugged},

		{group: "node", fault: "the driver's folder below /run full", says: "while pods start and end", rounds: 3, run: runFull},
		{group: "node", fault: "power cut", says: "under pods", as: alone, rounds: 2, run: rebooted((*lab.Node).Reset)},
		{group: "node", fault: "another NIC in front of the PF's slot, over a power cut, and away again", says: "under pods", as: alone, rounds: 1, run: pciShifted},
		{group: "node", fault: "reboot", says: "under pods", as: alone, rounds: 1, run: rebooted((*lab.Node).Reboot)},

		{group: "load", fault: "100 claims at once", rounds: 1, run: manyClaims(25, 4)},
		{group: "load", fault: "50 idle connections on every port", rounds: 1, run: idleConnections(50)},
		{group: "load", fault: "1,000 pods through VFs, 200 through dummies", says: "churn", rounds: 1, run: churn(1000, 200)},
		{group: "load", fault: "200 pods through VFs of two nodes, 50 through dummies, with addresses", says: "churn", as: alone, two: true, rounds: 1, run: addressChurn(200, 50)},
		{group: "load", fault: "40 pods through VFs, 10 through dummies", says: "churn", rounds: 1, run: churn(40, 10)},
	}
}

// coveredFault is a fault that an end-to-end test tries.
type coveredFault struct{ fault, test string }

var covered = []coveredFault{
	{"the agent restarted and killed under pods, nothing set up twice", "TestAgentRestart"},
	{"the agent killed between Prepare and sandbox, containers that do not list the claim included", "TestAgentDiesBeforeSandbox"},
	{"pods deleted, in order and by force, while the agent is away", "TestPodDeletedWhileAgentIsAway, TestPodDeletedByForceWhileAgentIsAway"},
	{"containerd restarted under pods", "TestRuntimeRestart"},
	{"a claim's record spoilt while the agent is away", "TestUnreadableRecord"},
	{"a pod deleted by force whose sandbox cannot be stopped", "TestForcedDeletion"},
	{"a second pod of a claim, also over restarts of kubelet and the agent", "TestSharedClaim, TestSharedClaimFromTheBeginning"},
	{"a sandbox that dies, with the agent up", "TestSandboxAgain"},
	{"alternative names that clash", "TestAltNames"},
	{"the second of two devices vanishes before the sandbox", "TestSecondDeviceVanishes"},
	{"what a pod changes on its interface", "TestPodChangesInterface"},
	{"the pod's namespace destroyed while the agent is away", "TestNamespaceGone"},
	{"the VF's name taken while it is in a pod", "TestNameTaken"},
	{"a VF without a driver, or with another one", "TestDriverOfVF"},
	{"slices deleted by somebody", "TestSlices"},
	{"parameters and configurations that cannot be met", "TestBadParameters, TestNodeConfigNotMet"},
}

// notTried are faults that nothing here tries.
var notTried = []struct{ fault, why string }{
	{"a disk full under kubelet's folders", "kubelet evicts the pods, the witnesses too; the driver keeps only sockets there"},
	{"an older agent itself over records of a newer one", "there is no release yet to go back to: the version in journal and records is changed instead"},
}

// twoPods are the pods that a scenario uses.
var twoPods = []kind{{template: "vf", vlan: firstVLAN, shape: "plain"}, {template: netVF, shape: "sidecar"}}

// fault notes that the fault happens now.
func (b *bench) fault() { b.faultAt = time.Now() }

// recovered notes that all is well again: what follows is as without the fault.
func (b *bench) recovered() { b.took = time.Since(b.faultAt) }

// started makes the two pods and waits until they run.
func (b *bench) started(ctx context.Context, kinds ...kind) ([]string, error) {
	names, err := b.createAll(ctx, kinds...)
	if err != nil {
		return nil, err
	}
	return names, b.running(ctx, names...)
}

// underPods has something done while two pods run. They go on running, and new ones start.
func underPods(do func(*bench, context.Context) error) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		names, err := b.started(ctx, twoPods...)
		if err != nil {
			return err
		}
		b.fault()
		if err := do(b, ctx); err != nil {
			return err
		}
		more, err := b.started(ctx, kind{template: "vf", vlan: firstVLAN + 2, shape: "once"})
		if err != nil {
			return err
		}
		if err := b.running(ctx, names...); err != nil {
			return err
		}
		b.recovered()
		return b.delete(ctx, 1, append(names, more...)...)
	}
}

// whilePodsStart has something done when two pods have just been made.
func whilePodsStart(do func(*bench, context.Context) error) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, number int) error {
		names, err := b.createAll(ctx, twoPods...)
		if err != nil {
			return err
		}
		time.Sleep(time.Duration(500+400*(number%5)) * time.Millisecond)
		b.fault()
		if err := do(b, ctx); err != nil {
			return err
		}
		if err := b.running(ctx, names...); err != nil {
			return err
		}
		b.recovered()
		return b.delete(ctx, 1, names...)
	}
}

// whilePodsEnd has something done when two pods are being deleted.
func whilePodsEnd(do func(*bench, context.Context) error) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, number int) error {
		names, err := b.started(ctx, twoPods...)
		if err != nil {
			return err
		}
		if err := b.deleteNow(ctx, 1, names...); err != nil {
			return err
		}
		time.Sleep(time.Duration(800+300*(number%5)) * time.Millisecond)
		b.fault()
		if err := do(b, ctx); err != nil {
			return err
		}
		return b.gone(ctx, names...)
	}
}

func (b *bench) killContainerd(ctx context.Context) error {
	if _, err := b.node.Kill(ctx, lab.Containerd); err != nil {
		return err
	}
	return b.node.StartDaemon(ctx, lab.Daemon{Name: lab.Containerd})
}

func (b *bench) containerdAway(ctx context.Context) error {
	if _, err := b.node.Stop(ctx, lab.Containerd); err != nil {
		return err
	}
	time.Sleep(15 * time.Second)
	return b.node.StartDaemon(ctx, lab.Daemon{Name: lab.Containerd})
}

func (b *bench) restartKubelet(ctx context.Context) error { return b.node.Restart(ctx, lab.Kubelet) }

// again has something done so many times, with pauses.
func (b *bench) again(ctx context.Context, times int, do func(context.Context) error) error {
	for range times {
		if err := do(ctx); err != nil {
			return err
		}
		time.Sleep(time.Duration(1000+b.rand.IntN(4000)) * time.Millisecond)
	}
	return nil
}

// withoutNRI has containerd back with NRI off: pods wait, and start when it is on again.
func withoutNRI(ctx context.Context, b *bench, _ int) error {
	const config = "/etc/containerd/config.toml"
	nri := func(off bool) error {
		if _, err := b.node.Run(ctx, fmt.Sprintf(`sed -i '/nri.v1.nri.\]/,/disable/ s/disable = .*/disable = %t/' %s && grep -q 'disable = %t' %s`, off, config, off, config)); err != nil {
			return err
		}
		return b.node.Restart(ctx, lab.Containerd)
	}
	if err := nri(true); err != nil {
		return err
	}
	names, err := b.createAll(ctx, twoPods...)
	if err != nil {
		return err
	}
	time.Sleep(20 * time.Second)
	b.fault()
	if err := nri(false); err != nil {
		return err
	}
	if err := b.running(ctx, names...); err != nil {
		return err
	}
	b.recovered()
	return b.delete(ctx, 1, names...)
}

// secondPodWaits has something done, again and again, while a second pod waits for the claim of the first, which it gets in
// the end.
func secondPodWaits(times int, do func(*bench, context.Context) error) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		b.pods++
		claim := fmt.Sprintf("shared-%d", b.pods)
		if err := b.Apply(ctx, []byte(fmt.Sprintf(sharedClaim, claim, b.ns, driverName))); err != nil {
			return err
		}
		first, second := claim+"-a", claim+"-b"
		if err := b.create(ctx, first, kind{template: "vf", vlan: firstVLAN, shape: "plain", claim: claim}); err != nil {
			return err
		}
		if err := b.running(ctx, first); err != nil {
			return err
		}
		if err := b.create(ctx, second, kind{template: "vf", vlan: firstVLAN, shape: "plain", claim: claim}); err != nil {
			return err
		}
		b.fault()
		if err := b.again(ctx, times, func(ctx context.Context) error { return do(b, ctx) }); err != nil {
			return err
		}
		if err := b.running(ctx, first); err != nil {
			return err
		}
		if err := b.delete(ctx, 1, first); err != nil {
			return err
		}
		if err := b.running(ctx, second); err != nil {
			return err
		}
		b.recovered()
		if err := b.delete(ctx, 1, second); err != nil {
			return err
		}
		return b.Client.ResourceV1().ResourceClaims(b.ns).Delete(ctx, claim, metav1.DeleteOptions{})
	}
}

const sharedClaim = `
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s, namespace: %s}
spec: {devices: {requests: [{name: net, exactly: {deviceClassName: vf}}],
  config: [{opaque: {driver: %s, parameters: {podIfName: net0, vlan: 1001}}}]}}
`

// checkpointLost has kubelet forget what it has prepared while pods run: it asks for no Unprepare, also not for the pods that
// stay, which therefore begin anew.
func checkpointLost(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	if _, err := b.node.Stop(ctx, lab.Kubelet); err != nil {
		return err
	}
	if _, err := b.node.Run(ctx, "rm -f /var/lib/kubelet/dra_manager_state"); err != nil {
		return err
	}
	if err := b.node.StartDaemon(ctx, lab.Daemon{Name: lab.Kubelet}); err != nil {
		return err
	}
	if err := b.running(ctx, names...); err != nil {
		return err
	}
	b.fault()
	return b.anew(ctx, names)
}

// registrationEmptied has somebody remove the sockets by which kubelet finds the driver, again and again.
func registrationEmptied(long time.Duration) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		_, err := b.node.Run(ctx, fmt.Sprintf("end=$(($(date +%%s)+%d)); while [ $(date +%%s) -lt $end ]; do rm -rf /var/lib/kubelet/plugins_registry/*; sleep 1; done", int(long.Seconds())))
		if err != nil {
			return err
		}
		b.fault()
		names, err := b.started(ctx, twoPods...)
		if err != nil {
			return err
		}
		b.recovered()
		return b.delete(ctx, 1, names...)
	}
}

// registrationFull has no room for a socket in the folder by which kubelet finds the driver, when the agent starts.
func registrationFull(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	if err := b.killAgent(ctx); err != nil {
		return err
	}
	const folder = "/var/lib/kubelet/plugins_registry"
	// One inode is the folder's own.
	if _, err := b.node.Run(ctx, "mount -t tmpfs -o nr_inodes=1 faults "+folder); err != nil {
		return err
	}
	err = b.StartAgent(ctx, b.node)
	var more []string
	if err == nil {
		more, err = b.createAll(ctx, kind{template: "vf", vlan: firstVLAN + 2, shape: "plain"})
	}
	if err == nil {
		err = b.running(ctx, names...)
	}
	time.Sleep(15 * time.Second)
	b.fault()
	_, umountErr := b.node.Run(ctx, "umount "+folder)
	if err := errors.Join(err, umountErr); err != nil {
		return err
	}
	if err := b.running(ctx, more...); err != nil {
		return err
	}
	b.recovered()
	return b.delete(ctx, 1, append(names, more...)...)
}

// sandboxAnew kills the pods' sandboxes, so that kubelet makes them others.
func sandboxAnew(away bool) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		names, err := b.started(ctx, twoPods...)
		if err != nil {
			return err
		}
		rows, err := b.reader.Table(ctx, "networkdriver-dra-allocations")
		if err != nil {
			return err
		}
		if away {
			if err := b.killAgent(ctx); err != nil {
				return err
			}
		}
		b.fault()
		mine := map[string]bool{}
		for _, name := range names {
			pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			mine[string(pod.UID)] = true
		}
		for _, row := range rows {
			if mine[row.Pod] {
				if _, err := b.node.Run(ctx, "ctr -n k8s.io tasks kill -s SIGKILL "+row.Sandbox); err != nil {
					return err
				}
			}
		}
		if away {
			time.Sleep(20 * time.Second) // until kubelet has tried to make others
			if err := b.startAgent(ctx); err != nil {
				return err
			}
		}
		if err := b.running(ctx, names...); err != nil {
			return err
		}
		b.recovered()
		return b.delete(ctx, 1, names...)
	}
}

// namespaceGone has all processes of a pod killed and its namespace removed, with the agent up, while the pod is deleted.
func namespaceGone(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	b.fault()
	for _, name := range names {
		out, err := b.inPod(ctx, name, "readlink /proc/self/ns/net")
		if err != nil {
			return err
		}
		if _, err := b.node.Run(ctx, fmt.Sprintf(`for p in /proc/[0-9]*; do [ "$(readlink $p/ns/net)" = "%s" ] && kill -9 ${p#/proc/}; done
for f in /run/netns/*; do [ "net:[$(stat -Lc %%i $f)]" = "%s" ] && umount $f && rm -f $f; done; true`, out, out)); err != nil {
			return err
		}
	}
	return b.delete(ctx, 1, names...)
}

// cdiWiped has the CDI folder emptied, and a container started again afterwards.
func cdiWiped(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	b.fault()
	if _, err := b.node.Run(ctx, "rm -rf /run/cdi/*"); err != nil {
		return err
	}
	for _, name := range names {
		pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		id := strings.TrimPrefix(pod.Status.ContainerStatuses[0].ContainerID, "containerd://")
		if _, err := b.node.Run(ctx, "ctr -n k8s.io tasks kill -s SIGKILL "+id); err != nil {
			return err
		}
	}
	err = b.eventually(ctx, "containers", func(ctx context.Context) string {
		for _, name := range names {
			pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if s := pod.Status.ContainerStatuses[0]; s.RestartCount == 0 || !s.Ready {
				return fmt.Sprintf("%s: %+v; %v", name, s, b.events(ctx, *pod))
			}
		}
		return ""
	})
	if err != nil {
		return err
	}
	b.recovered()
	return b.delete(ctx, 1, names...)
}

// cdiFull has no room in the CDI folder when pods start.
func cdiFull(ctx context.Context, b *bench, _ int) error {
	// With what is there, and nothing more.
	if _, err := b.node.Run(ctx, `mkdir -p /run/faults-cdi && cp /run/cdi/* /run/faults-cdi/ && mount -t tmpfs -o size=64k faults /run/cdi &&
cp /run/faults-cdi/* /run/cdi/ && { dd if=/dev/zero of=/run/cdi/filler bs=4k 2>/dev/null; true; }`); err != nil {
		return err
	}
	undo := func(ctx context.Context) error {
		_, err := b.node.Run(ctx, "umount /run/cdi && rm -rf /run/faults-cdi")
		return err
	}
	names, err := b.createAll(ctx, twoPods...)
	if err == nil {
		time.Sleep(15 * time.Second)
		out, podErr := b.node.Run(ctx, "cat "+seenDir+"/p* 2>/dev/null; true")
		if err = podErr; err == nil && out != "" {
			err = fmt.Errorf("containers started although the CDI folder is full: %s", out)
		}
	}
	b.fault()
	if err := errors.Join(err, undo(ctx)); err != nil {
		return err
	}
	if err := b.running(ctx, names...); err != nil {
		return err
	}
	b.recovered()
	return b.delete(ctx, 1, names...)
}

// apiAway has the API server and etcd away. Meanwhile a pod's sandbox dies, and the agent is restarted.
func apiAway(long time.Duration, restart bool) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		names, err := b.started(ctx, twoPods...)
		if err != nil {
			return err
		}
		cp := b.ControlPlane()
		b.fault()
		for _, program := range []string{lab.APIServer, lab.Etcd} {
			if err := cp.StopProgram(program); err != nil {
				return err
			}
		}
		if restart {
			if err := b.killAgent(ctx); err != nil {
				return err
			}
			if err := b.StartAgent(ctx, b.node); err != nil {
				return err
			}
		}
		time.Sleep(long)
		for _, program := range []string{lab.Etcd, lab.APIServer} {
			if err := cp.Start(ctx, program); err != nil {
				return err
			}
		}
		b.fault()
		more, err := b.started(ctx, kind{template: "vf", vlan: firstVLAN + 2, shape: "once"})
		if err != nil {
			return err
		}
		if err := b.running(ctx, names...); err != nil {
			return err
		}
		b.recovered()
		return b.delete(ctx, 1, append(names, more...)...)
	}
}

// apiAwayWhilePodsEnd has the API server go when pods have just been deleted by force, and the agent killed meanwhile.
func apiAwayWhilePodsEnd(ctx context.Context, b *bench, number int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	if err := b.deleteNow(ctx, 0, names...); err != nil {
		return err
	}
	b.fault()
	if err := b.ControlPlane().StopProgram(lab.APIServer); err != nil {
		return err
	}
	if number%2 == 1 {
		if err := b.killAgent(ctx); err != nil {
			return err
		}
		if err := b.StartAgent(ctx, b.node); err != nil {
			return err
		}
	}
	time.Sleep(10 * time.Second)
	if err := b.ControlPlane().Start(ctx, lab.APIServer); err != nil {
		return err
	}
	return b.gone(ctx, names...)
}

// forcedDeletion deletes pods; without any grace the API forgets pod and claim at once.
func forcedDeletion(away bool, grace int64) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		names, err := b.started(ctx, append(twoPods, kind{template: "dummy", shape: "plain"})...)
		if err != nil {
			return err
		}
		if away {
			if err := b.killAgent(ctx); err != nil {
				return err
			}
		}
		b.fault()
		for _, name := range names {
			if err := b.deleteNow(ctx, grace, name); err != nil {
				return err
			}
			time.Sleep(time.Duration(b.rand.IntN(1000)) * time.Millisecond)
		}
		if away {
			time.Sleep(5 * time.Second)
			if err := b.startAgent(ctx); err != nil {
				return err
			}
		}
		return b.gone(ctx, names...)
	}
}

// claimsDeleted deletes the claims of running pods by force, finalizers and all, and then the pods.
func claimsDeleted(away bool) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		names, err := b.started(ctx, twoPods...)
		if err != nil {
			return err
		}
		if away {
			if err := b.killAgent(ctx); err != nil {
				return err
			}
		}
		b.fault()
		claims := b.Client.ResourceV1().ResourceClaims(b.ns)
		list, err := claims.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, claim := range list.Items {
			if len(claim.OwnerReferences) != 1 || strings.HasPrefix(claim.OwnerReferences[0].Name, "stays-") {
				continue
			}
			if err := claims.Delete(ctx, claim.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
				return err
			}
			if err := b.dropFinalizers(ctx, claim.Name); err != nil {
				return err
			}
		}
		time.Sleep(3 * time.Second)
		if away {
			if err := b.startAgent(ctx); err != nil {
				return err
			}
		}
		return b.delete(ctx, 1, names...)
	}
}

func (b *bench) dropFinalizers(ctx context.Context, claim string) error {
	_, err := b.Client.ResourceV1().ResourceClaims(b.ns).Patch(ctx, claim, "application/merge-patch+json",
		[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	return err
}

// reallocated has a claim of its own name freed and allotted another device, under the same UID, while kubelet cannot tell
// the driver: the device that it had goes to another pod meanwhile.
func reallocated(ctx context.Context, b *bench, _ int) error {
	b.pods++
	claim := fmt.Sprintf("again-%d", b.pods)
	if err := b.Apply(ctx, []byte(fmt.Sprintf(sharedClaim, claim, b.ns, driverName))); err != nil {
		return err
	}
	allotted := func(ctx context.Context) string {
		c, err := b.Client.ResourceV1().ResourceClaims(b.ns).Get(ctx, claim, metav1.GetOptions{})
		if err != nil || c.Status.Allocation == nil || len(c.Status.Allocation.Devices.Results) == 0 {
			return ""
		}
		return c.Status.Allocation.Devices.Results[0].Device
	}
	first, second := claim+"-a", claim+"-b"
	if err := b.create(ctx, first, kind{template: "vf", vlan: firstVLAN, shape: "plain", claim: claim}); err != nil {
		return err
	}
	if err := b.running(ctx, first); err != nil {
		return err
	}
	had := allotted(ctx)
	if err := b.node.Signal(ctx, lab.Kubelet, unix.SIGSTOP); err != nil {
		return err
	}
	b.fault()
	err := b.delete(ctx, 0, first)
	if err == nil {
		err = b.eventually(ctx, "claim", func(ctx context.Context) string { return allotted(ctx) })
	}
	var others []string
	if err == nil {
		others, err = b.createAll(ctx, kind{template: "vf", vlan: firstVLAN + 1, shape: "plain"})
	}
	if err == nil {
		err = b.eventually(ctx, "the other pod's claim", func(ctx context.Context) string {
			pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, others[0], metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if pod.Spec.NodeName == "" {
				return "is not scheduled"
			}
			return ""
		})
	}
	if err == nil {
		err = b.create(ctx, second, kind{template: "vf", vlan: firstVLAN, shape: "plain", claim: claim})
	}
	if err == nil {
		err = b.eventually(ctx, "claim", func(ctx context.Context) string {
			if now := allotted(ctx); now == "" || now == had {
				return fmt.Sprintf("has device %q, had %q", now, had)
			}
			return ""
		})
	}
	if err := errors.Join(err, b.node.Signal(ctx, lab.Kubelet, unix.SIGCONT)); err != nil {
		return err
	}
	names := append(others, second)
	if err := b.running(ctx, names...); err != nil {
		return err
	}
	b.recovered()
	if err := b.delete(ctx, 1, names...); err != nil {
		return err
	}
	return b.Client.ResourceV1().ResourceClaims(b.ns).Delete(ctx, claim, metav1.DeleteOptions{})
}

// reallocatedElsewhere has a claim of its own name freed and allotted on the node beside, under the same UID, while kubelet cannot
// tell the driver. What the first node has to do late must not touch the second one's.
func reallocatedElsewhere(ctx context.Context, b *bench, number int) error {
	b.pods++
	claim := fmt.Sprintf("moves-%d", b.pods)
	if err := b.Apply(ctx, []byte(fmt.Sprintf(sharedClaim, claim, b.ns, driverName))); err != nil {
		return err
	}
	first, second := claim+"-a", claim+"-b"
	k := kind{template: "vf", vlan: firstVLAN, shape: "plain", claim: claim}
	if err := b.create(ctx, first, k); err != nil {
		return err
	}
	if err := b.running(ctx, first); err != nil {
		return err
	}
	if err := b.node.Signal(ctx, lab.Kubelet, unix.SIGSTOP); err != nil {
		return err
	}
	b.fault()
	err := b.delete(ctx, 0, first)
	if err == nil {
		k.node = b.beside.node
		err = b.create(ctx, second, k)
	}
	if err == nil {
		err = b.ready(ctx, second)
	}
	if number%2 == 1 {
		err = errors.Join(err, b.killAgent(ctx), b.StartAgent(ctx, b.node))
	}
	if err := errors.Join(err, b.node.Signal(ctx, lab.Kubelet, unix.SIGCONT)); err != nil {
		return err
	}
	if err := b.restored(ctx); err != nil {
		return err
	}
	b.recovered()
	if err := b.eventually(ctx, "claim", func(ctx context.Context) string {
		now, err := b.Client.ResourceV1().ResourceClaims(b.ns).Get(ctx, claim, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if d := now.Status.Devices; len(d) != 1 || !strings.HasPrefix(d[0].Pool, b.beside.node.Name()+"/") || !meta.IsStatusConditionTrue(d[0].Conditions, "Ready") {
			return fmt.Sprintf("its status has %+v instead of one device of %s that is Ready", d, b.beside.node.Name())
		}
		return ""
	}); err != nil {
		return err
	}
	if err := b.delete(ctx, 1, second); err != nil {
		return err
	}
	return b.Client.ResourceV1().ResourceClaims(b.ns).Delete(ctx, claim, metav1.DeleteOptions{})
}

// laterVersion makes what the driver wrote down of running pods what a later version might have written, as if the agent were
// one that was gone back to. Their devices stay where they are, and others are given out. Then the later version is back.
func laterVersion(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	const now, later = `"version":([0-9])\b`, `"version":100([0-9])\b`
	to := map[string]string{now: `"version":100$1`, later: `"version":$1`}
	version := func(from string) error {
		if _, err := b.node.Run(ctx, fmt.Sprintf(`sed -E -i 's/%s/%s/' /run/cilium/networkdriver/*.json`, from, strings.ReplaceAll(to[from], "$", `\`))); err != nil {
			return err
		}
		claims := b.Client.ResourceV1().ResourceClaims(b.ns)
		list, err := claims.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, claim := range list.Items {
			for i := range claim.Status.Devices {
				if data := claim.Status.Devices[i].Data; data != nil {
					data.Raw = regexp.MustCompile(from).ReplaceAll(data.Raw, []byte(to[from]))
				}
			}
			if _, err := claims.UpdateStatus(ctx, &claim, metav1.UpdateOptions{}); err != nil {
				return err
			}
		}
		return nil
	}
	if err := b.killAgent(ctx); err != nil {
		return err
	}
	if err := version(now); err != nil {
		return err
	}
	if err := b.startAgent(ctx); err != nil {
		return err
	}
	more, err := b.started(ctx, kind{template: "vf", vlan: firstVLAN + 2, shape: "plain"})
	if err != nil {
		return err
	}
	if err := b.running(ctx, append(names, stays...)...); err != nil {
		return err
	}
	if err := b.killAgent(ctx); err != nil {
		return err
	}
	if err := version(later); err != nil {
		return err
	}
	b.fault()
	if err := b.startAgent(ctx); err != nil {
		return err
	}
	if err := b.running(ctx, append(names, more...)...); err != nil {
		return err
	}
	b.recovered()
	return b.delete(ctx, 1, append(names, more...)...)
}

// twoAgents starts a second agent beside the first, as a pod does that follows one deleted by force, and ends the first.
func twoAgents(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	const second = "second-agent"
	if err := b.node.Start(ctx, second, deploy.AgentCommand(b.node, "--prometheus-serve-addr=", "--socket-path=/run/second-agent.sock", "--shell-sock-path=/run/second-shell.sock")...); err != nil {
		return err
	}
	time.Sleep(10 * time.Second)
	b.fault()
	more, err := b.started(ctx, kind{template: "vf", vlan: firstVLAN + 2, shape: "plain"})
	if err != nil {
		return err
	}
	if err := b.killAgent(ctx); err != nil {
		return err
	}
	again, err := b.started(ctx, kind{template: "vf", vlan: firstVLAN, shape: "plain"})
	if err != nil {
		return err
	}
	if _, err := b.node.Stop(ctx, second); err != nil {
		return err
	}
	if err := b.startAgent(ctx); err != nil {
		return err
	}
	b.recovered()
	if _, err := b.node.Run(ctx, "rm -f /run/second-*"); err != nil {
		return err
	}
	return b.delete(ctx, 1, append(append(names, more...), again...)...)
}
